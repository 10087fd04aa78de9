"""MaskPool: sessions take their tokens and masks are filled by threads of `native.c`, without the interpreter lock.

The threads begin when the tokens of a step are known and run while the scheduler commits the step and plans the next
one. They poll between two steps, since waking a thread takes as long as the masks of a step. A mask that is not filled
in time becomes a `LateMask`: its thread goes on, and writes to memory of its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.base.host import num_cpus
from slipstream.contracts.step import StepMasks
from slipstream.scheduler.grammar.draws import DrawGroup
from slipstream.scheduler.grammar.session import Session, Words

_MAX_THREADS = 8
_MIN_CORES = 8  # with fewer cores several threads compete with the model
_POLL_NS = 3_000_000
_NUM_PARTS = 4  # of the entries: a batch takes one that no late mask of an earlier batch uses
_MAX_FORCED = 64  # this and the following as in native.c
_STOPPED, _ERROR, _MAY_END = 1, 2, 4
_DONE, _ENDED = 2, 4
ROW = np.dtype(
    [
        ("matcher", np.uint64), ("walker", np.uint64), ("spare", np.uint64), ("index", np.int32), ("token", np.int32),
        ("forced", np.int32), ("flags", np.int32), ("num_forced", np.int32), ("seconds", np.float32),
        ("state", np.int32), ("tokens", np.uint32, _MAX_FORCED), ("padding", np.int32),
    ]
)  # fmt: skip
_FUNCTIONS = (
    "llg_matcher_consume_token", "llg_matcher_is_stopped", "llg_matcher_is_error", "llg_matcher_compute_ff_tokens",
    "llg_matcher_compute_mask_into",
)  # fmt: skip


def default_threads() -> int:
    cores = num_cpus()
    return min(_MAX_THREADS, cores // 2) if cores >= _MIN_CORES else 1


def function_addresses() -> list[int | None]:
    """Addresses of the functions of llguidance that the threads call, in the order of `Functions` in native.c."""
    own = llguidance_library()
    assert own is not None
    return [ctypes.cast(getattr(own, name), ctypes.c_void_p).value for name in _FUNCTIONS]


class MaskBatch:
    """Sessions that threads process together."""

    __slots__ = ("sessions", "inputs")

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.inputs: list[int] = []  # as `slip_masks_start` takes them

    def add(self, session: Session, token: int, index: int) -> None:
        """The session takes this token, -1: none, and then the mask with this index is filled, -1: none."""
        forced = session.forced
        if token >= 0:
            session.num_taken += 1
            if forced:
                del forced[0]
        self.sessions.append(session)
        self.inputs += (*session.pointers, token, forced[0] if forced else -1, index)

    def index_of(self, number: int) -> int:
        """Index of the mask of this row; -1: none."""
        return self.inputs[5 * number + 4]

    def packed(self) -> tuple[int, object]:
        """The address of the inputs, and what must live while it is read."""
        packed = array("q", self.inputs)
        return packed.buffer_info()[0], packed


_NO_BATCH = MaskBatch()


class MaskPool:
    def __init__(
        self,
        library: ctypes.CDLL,
        num_words: int,
        end: int,
        max_rows: int,
        num_threads: int | None = None,
        max_masks: int = 0,
    ) -> None:
        """`library`: the compiled native.c. `num_words` of a mask. `end`: the bit for the end of the grammar.
        `max_masks`: that are kept for later steps; 0: by their size."""
        addresses = function_addresses()
        functions = (ctypes.c_void_p * len(addresses))(*addresses)
        threads = default_threads() if num_threads is None else num_threads
        num_entries, poll = _NUM_PARTS * max_rows, _POLL_NS if threads > 1 else 0
        self._library = library
        self._pool = library.slip_masks_open(
            ctypes.addressof(functions), end, num_words, threads, num_entries, poll, max_masks
        )
        self._masks = _Masks()
        if not self._pool:
            raise MemoryError("no memory or no threads for the masks of grammars")
        memory: Any = (ctypes.c_char * (num_entries * ROW.itemsize)).from_address(library.slip_masks_rows(self._pool))
        table: NDArray[Any] = np.frombuffer(memory, ROW)
        self._columns = {name: table[name] for name in ROW.names or ()}
        self._max_rows = max_rows
        self._num_words = num_words
        self._first = 0  # entry of the batch
        self._late: list[LateMask] = []  # that use an entry
        self._batch: MaskBatch | DrawGroup = _NO_BATCH  # that runs
        self._changed = np.zeros(max_rows, np.int32)
        self._had_slow = False  # the last batch

    def start(self, batch: MaskBatch | DrawGroup, masks: StepMasks | None, *, keeps: bool = False) -> None:
        """Begin to process a batch; masks are written to `masks`. `keeps`: the device has a table, so that masks that
        it has need not be written. Nothing else may use the sessions before `wait` returns."""
        assert not self._batch.sessions, "the last sessions were not waited for"
        self._first = first = self._free_part()
        if masks is not None:
            self._masks.point_to(masks, keeps=keeps)
        self._batch = batch
        address, _owner = batch.packed()
        self._library.slip_masks_start(self._pool, first, len(batch.sessions), ctypes.addressof(self._masks), address)

    def send(self, masks: StepMasks | None) -> None:
        """The masks of the step are complete. `masks`: if the device keeps some of them."""
        if masks is None or masks.targets is None:
            self._library.slip_masks_send(self._pool, None, 0, 0)
        else:
            targets = masks.targets
            self._library.slip_masks_send(self._pool, targets.ctypes.data, len(targets), masks.first_kept)

    @property
    def is_running(self) -> bool:
        """Whether sessions were started and not waited for."""
        return bool(self._batch.sessions)

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        num = len(self._batch.sessions)
        return not num or not self._library.slip_masks_wait(self._pool, self._first, num, 0)

    def wait(self, bits: Words | None, budget: float, limit: float | None = None) -> None:
        """Wait until all are processed, and update the sessions. A session that took longer than `budget` seconds for
        masks becomes slow. `limit`: seconds to wait; then the other sessions get a `LateMask` as their job."""
        batch, self._batch = self._batch, _NO_BATCH
        sessions, first = batch.sessions, self._first
        if not sessions:
            return
        limit_ns = -1 if limit is None else max(0, int(limit * 1e9))
        if self._library.slip_masks_wait(self._pool, first, len(sessions), limit_ns):
            self._abandon(batch)
        if self._had_slow:
            for number, session in enumerate(sessions):
                if batch.index_of(number) >= 0 and session.job is None:
                    session.is_slow = False
            self._had_slow = False
        numbers = self._changed
        num = self._library.slip_masks_changed(self._pool, first, len(sessions), budget, numbers.ctypes.data)
        for number in numbers[:num].tolist():
            session = sessions[number]
            if session.job is not None:
                continue
            entry, index = first + number, batch.index_of(number)
            _update(session, *self.read(entry), None if bits is None or index < 0 else bits[index])
            if index >= 0 and self._columns["seconds"][entry] > budget:
                session.note_slow()
                self._had_slow |= session.is_slow

    def _abandon(self, batch: MaskBatch | DrawGroup) -> None:
        """Give sessions whose mask is not filled a `LateMask`."""
        columns, first = self._columns, self._first
        for number in (columns["state"][first : first + len(batch.sessions)] != _DONE).nonzero()[0].tolist():
            entry, session = first + number, batch.sessions[number]
            mask = np.zeros(self._num_words, np.uint32) if batch.index_of(number) >= 0 else None
            columns["spare"][entry] = 0 if mask is None else mask.ctypes.data
            if self._library.slip_masks_abandon(self._pool, entry):
                session.job = LateMask(self, entry, session, mask)
                session.note_slow()
                self._late.append(session.job)

    def _free_part(self) -> int:
        """The first entry of a part that no late mask uses."""
        if self._late:
            self._late = [late for late in self._late if not late.done()]
            used = {late.entry // self._max_rows for late in self._late}
            if len(used) == _NUM_PARTS:
                self._late[0].result()
                return self._free_part()
            return next(part for part in range(_NUM_PARTS) if part not in used) * self._max_rows
        return 0

    @property
    def num_found(self) -> int:
        """Masks that were copied from states seen before."""
        num: int = self._library.slip_masks_num_found(self._pool)
        return num

    def has_ended(self, entry: int, *, wait: bool) -> bool:
        """Whether the thread of an abandoned row has ended."""
        if wait:
            self._library.slip_masks_wait(self._pool, entry, 1, -1)
        return int(self._columns["state"][entry]) == _ENDED

    def read(self, entry: int) -> tuple[int, list[int]]:
        """The flags and the forced tokens of a processed row."""
        num = int(self._columns["num_forced"][entry])
        tokens: list[int] = self._columns["tokens"][entry, :num].tolist()
        return int(self._columns["flags"][entry]), tokens

    def close(self) -> None:
        if self._pool:
            for late in self._late:
                late.result()
            self._library.slip_masks_close(self._pool)
            self._pool, self._batch, self._late = None, _NO_BATCH, []


class _Masks(ctypes.Structure):
    """As `Masks` in native.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("bits", "entries", "targets")] + [("first", ctypes.c_int64)]

    def point_to(self, masks: StepMasks, *, keeps: bool) -> None:
        self.bits = masks.bits.ctypes.data
        self.entries = self.targets = None
        if keeps and masks.entries is not None and masks.targets is not None:
            self.entries, self.targets = masks.entries.ctypes.data, masks.targets.ctypes.data
            self.first = masks.first_kept


class LateMask:
    """The job of a session whose mask was not filled in time. Until it is done, only its thread uses the matcher."""

    def __init__(self, pool: MaskPool, entry: int, session: Session, mask: Words | None) -> None:
        self.entry = entry
        self._pool = pool
        self._session = session
        self._mask = mask
        self._found: tuple[int, list[int]] | None = None  # what the thread has found
        self._is_applied = False

    def done(self) -> bool:
        if self._found is None and self._pool.has_ended(self.entry, wait=False):
            self._found = self._pool.read(self.entry)  # the entry may be used again from now on
        return self._found is not None

    def result(self) -> None:
        """Wait until the mask is filled, and update the session."""
        if self._found is None:
            self._pool.has_ended(self.entry, wait=True)
            self._found = self._pool.read(self.entry)
        session = self._session
        if self._is_applied or session.job is not self:
            return
        self._is_applied = True
        _update(session, *self._found, self._mask)
        session.ready = self._mask


def _update(session: Session, flags: int, forced: list[int], mask: Words | None) -> None:
    """Apply what a thread has found after it has taken the session's token and filled this mask."""
    if flags & _STOPPED:
        session.is_complete = not flags & _ERROR
    elif forced:  # if there is no room for more, there may be more
        session.forced = forced if len(forced) < _MAX_FORCED else session.matcher.compute_ff_tokens()
    if flags & _MAY_END and mask is not None:
        session.allow_end(mask)


# The C functions of the shared library of llguidance's Python package.

log = logging.getLogger(__name__)

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llg_new_tokenizer_v2": (_POINTER, [_POINTER, ctypes.c_char_p, _SIZE]),
    "llg_free_tokenizer": (None, [_POINTER]),
    "llg_constraint_init_set_defaults": (None, [_POINTER, _POINTER]),
    "llg_new_matcher": (_POINTER, [_POINTER, ctypes.c_char_p, ctypes.c_char_p]),
    "llg_clone_matcher": (_POINTER, [_POINTER]),
    "llg_matcher_reset": (ctypes.c_int32, [_POINTER]),
    "llg_free_matcher": (None, [_POINTER]),
    "llg_matcher_consume_token": (ctypes.c_int32, [_POINTER, ctypes.c_uint32]),
    "llg_matcher_is_stopped": (ctypes.c_bool, [_POINTER]),
    "llg_matcher_is_error": (ctypes.c_bool, [_POINTER]),
    "llg_matcher_get_error": (ctypes.c_char_p, [_POINTER]),
    "llg_matcher_compute_ff_tokens": (ctypes.c_int32, [_POINTER, _POINTER, _SIZE]),
    "llg_matcher_compute_mask_into": (ctypes.c_int32, [_POINTER, _POINTER, _SIZE]),
}


@functools.cache
def llguidance_library() -> ctypes.CDLL | None:
    """The library of the llguidance package; None if it does not export these functions."""
    from llguidance import _lib

    try:
        library = ctypes.CDLL(str(_lib.__file__))
        for name, (result, arguments) in _SIGNATURES.items():
            function: Any = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        log.info("llguidance is used without its C functions: %s", error)
        return None
    return library


# The compiled threads of `native.c`: of the wheel, or compiled on the user's machine if it has a C compiler.
#
# The host half cannot import `ops/platform/native.py`, which needs torch. The library is small and compiles in under a
# second, in the background thread that compiles the first grammar. Without it, grammars run in Python, one row after
# another.
#
# SLIPSTREAM_NATIVE=0 in the environment disables it, as it disables the kernels of `ops`.

FLAGS = ("-O2", "-fPIC", "-std=gnu11", "-pthread", "-shared")
SOURCES = tuple(Path(__file__).with_name(f"{name}.c") for name in ("native", "masks", "json"))
HEADERS = tuple(Path(__file__).with_name(f"{name}.h") for name in ("masks", "json"))
PREBUILT = Path(__file__).with_name("prebuilt")
_COMPILE_LIMIT = 60.0  # seconds
_PTR, _INT = ctypes.c_void_p, ctypes.c_int64
_POOL_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "slip_masks_open": (_PTR, [_PTR, _INT, _INT, _INT, _INT, _INT, _INT]),
    "slip_masks_rows": (_PTR, [_PTR]),
    "slip_masks_start": (None, [_PTR, _INT, _INT, _PTR, _PTR]),
    "slip_masks_changed": (_INT, [_PTR, _INT, _INT, ctypes.c_float, _PTR]),
    "slip_masks_send": (None, [_PTR, _PTR, _INT, _INT]),
    "slip_masks_wait": (_INT, [_PTR, _INT, _INT, _INT]),
    "slip_masks_abandon": (_INT, [_PTR, _INT]),
    "slip_masks_close": (None, [_PTR]),
    "slip_texts_open": (_PTR, [_PTR]),
    "slip_texts_close": (None, [_PTR]),
    "slip_masks_num_found": (_INT, [_PTR]),
    "slip_schema_open": (
        _PTR,
        [_PTR, _INT, _PTR, _PTR, _PTR, _INT, _PTR, _PTR, _PTR, _INT],
    ),
    "slip_schema_close": (None, [_PTR]),
    "slip_walker_open": (_PTR, [_PTR]),
    "slip_walker_copy": (_PTR, [_PTR]),
    "slip_walker_reset": (None, [_PTR]),
    "slip_walker_take": (None, [_PTR, _INT]),
    "slip_walker_close": (None, [_PTR]),
}


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library; None without a compiler. The first call may compile it."""
    if os.environ.get("SLIPSTREAM_NATIVE") == "0":
        return None
    for path in (PREBUILT / f"{platform.machine()}.so", _compiled()):
        if path is not None and path.exists():
            try:
                return _open(path)
            except OSError as error:  # compiled for another C library
                log.info("the threads for grammars cannot be loaded: %s", error)
    return None


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _POOL_SIGNATURES.items():
        function: Any = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _compiled() -> Path | None:
    """The library in the user's cache folder, compiled now if it is not there."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    key = hashlib.sha256(
        b"".join(path.read_bytes() for path in (*SOURCES, *HEADERS))
        + " ".join((compiler, platform.machine(), *FLAGS)).encode()
    )
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    target = Path(base) / "slipstream" / "native" / f"grammar-{key.hexdigest()[:24]}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = os.path.join(folder, "grammar.so")
            command = [compiler, *FLAGS, *map(str, SOURCES), "-o", made]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_LIMIT)
            os.replace(made, target)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("the threads for grammars did not compile, masks are filled one after another: %s", error)
        return None
    return target
