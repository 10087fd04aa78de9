"""Fused CPU kernels in C: compiled in the wheel, or on the user's machine if it has a C compiler.

A file of C beside an op replaces many small torch calls by one. Wheels have compiled kernels (`prebuilt.py`). In a
checkout the first decode step starts the compilation in a background thread, so that no first token waits; until it
ends, and without a compiler, the references run. Only low-bit weights wait for the kernels
(`ops/gemm/low_bit/interleaved.py`), since no torch GEMM is as accurate. The library is kept in the user's cache folder
under a hash of sources, flags and processor. Kernels take float32 on the CPU.

SLIPSTREAM_NATIVE=0 in the environment disables the kernels.
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
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slipstream.base.host import num_cpus
from slipstream.device.device import openmp_library
from slipstream.ops.platform import prebuilt

log = logging.getLogger(__name__)

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_FLAGS = (*prebuilt.FLAGS, "-march=native")
_COMPILE_LIMIT = 120.0  # seconds

_library: ctypes.CDLL | None = None
_library_path: Path | None = None  # of a library of the wheel
_looked_up = _building = _failed = False
_lock = threading.Lock()


def library() -> ctypes.CDLL | None:
    """The compiled kernels; None until they are compiled. Cheap to call."""
    if not _looked_up:
        _open_compiled()
    return _library


def serves(x: torch.Tensor) -> bool:
    """Whether the kernels can take this tensor: a plain float32 tensor on the CPU, and the kernels are compiled."""
    return type(x) is torch.Tensor and x.dtype is torch.float32 and x.is_cpu and library() is not None


def build_in_background() -> None:
    """Starts the compilation unless it was started before. Called by the first decode step."""
    global _building
    if _building or library() is not None:
        return
    with _lock:
        if _building:
            return
        _building = True
    if _enabled() and _compiler() is not None:
        threading.Thread(target=build, args=(10,), name="slipstream-compile", daemon=True).start()


def state() -> str:
    """The state of the kernels in words, for `slipstream doctor` and warnings."""
    if library() is not None:
        return "compiled" if _library_path is None else f"compiled, of the wheel ({_library_path.stem})"
    if not _enabled():
        return "disabled by SLIPSTREAM_NATIVE=0"
    if _failed:
        return "none: the compilation failed"
    return "none: no C compiler" if _target() is None else "compiled in the background by the first run"


def build(nice: int = 0) -> bool:
    """Compiles the kernels now if necessary: a few seconds, once per machine. Returns whether they are available."""
    global _failed, _library
    if library() is not None:
        return True
    target = _target()
    if not _enabled() or target is None or _failed:
        return False
    log.info("compiling the fused CPU kernels (a few seconds, once per machine)")
    try:
        _compile(target, nice)
        _library = _load(target)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("the fused CPU kernels did not compile, using torch operations instead: %s", _reason(error))
        _failed = True
        return False
    return True


def cache_folder() -> Path:
    """Of compiled libraries, and of what was measured with them."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "slipstream" / "native"


def identity() -> str:
    """Differs between versions of the kernels and between processors. Only if the kernels are available."""
    path = _library_path or _target()
    assert path is not None and library() is not None, "there are no kernels"
    key = hashlib.sha256(path.read_bytes() if _library_path else path.name.encode())
    key.update(_processor().encode())
    return key.hexdigest()[:24]


def _open_compiled() -> None:
    global _looked_up, _library
    with _lock:
        if _looked_up:
            return
        if _enabled():
            _library = _open_prebuilt() or _open_cached()
        _looked_up = True


def _open_prebuilt() -> ctypes.CDLL | None:
    path = prebuilt.find()
    if path is None or openmp_library() is None:
        return None
    global _library_path
    try:
        found = _load(path)
        _library_path = path
        return found
    except OSError as error:  # for example an older C library
        log.info("the CPU kernels of the wheel cannot be used: %s", error)
        return None


def _open_cached() -> ctypes.CDLL | None:
    target = _target()
    if target is None or not target.exists():
        return None
    try:
        return _load(target)
    except OSError:
        target.unlink(missing_ok=True)  # compiled for another machine, or truncated
        return None


def _load(path: Path) -> ctypes.CDLL:
    runtime = openmp_library()
    if runtime is not None:
        ctypes.CDLL(runtime, ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function: Any = getattr(found, name)
        function.argtypes = arguments
        function.restype = INT if name in _RETURNING else None
    return found


def _compile(target: Path, nice: int) -> None:
    compiler = _compiler()
    assert compiler is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # Python code between fork and exec is unsafe with other threads, so it runs only if a niceness is set
        slow_down = (lambda: os.nice(nice)) if nice else None
        run = functools.partial(
            subprocess.run, check=True, capture_output=True, timeout=_COMPILE_LIMIT, preexec_fn=slow_down
        )
        objects = {str(source): os.path.join(folder, f"{source.stem}.o") for source in _sources()}
        with ThreadPoolExecutor(num_cpus()) as pool:
            commands = [
                [compiler, *_flags(), *prebuilt.INCLUDES, "-c", source, "-o", made] for source, made in objects.items()
            ]
            list(pool.map(run, commands))  # raises the first error
        result = os.path.join(folder, "all.so")
        # not linked with an OpenMP runtime: torch's runtime is used, so that there is one thread pool
        run([compiler, "-shared", *objects.values(), "-o", result])
        os.replace(result, target)


@functools.cache
def _sources() -> tuple[Path, ...]:
    return tuple(prebuilt.sources(Path(__file__).parents[1]))


@functools.cache
def _target() -> Path | None:
    """Path of the compiled library; None without a compiler."""
    compiler = _compiler()
    if compiler is None or not _sources():
        return None
    key = hashlib.sha256()
    for part in (compiler, *_flags(), platform.machine(), _processor()):
        key.update(part.encode() + b"\0")
    for source in (*_sources(), *sorted(prebuilt.HEADERS.glob("*.h"))):
        key.update(source.read_bytes() + b"\0")
    return cache_folder() / f"{key.hexdigest()[:24]}.so"


@functools.cache
def _flags() -> tuple[str, ...]:
    return (*_FLAGS, "-fopenmp") if openmp_library() is not None else _FLAGS


@functools.cache
def _compiler() -> str | None:
    names = ("gcc",) if openmp_library() is not None else ()  # other compilers would call another OpenMP runtime
    return next((path for name in (*names, "cc") if (path := shutil.which(name))), None)


def _processor() -> str:
    """The processor features that -march=native depends on: a home folder may be shared between machines."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = ("flags", "features", "model name", "cpu part")
            return "".join(sorted({line for line in lines if line.lower().startswith(names)}))
    except OSError:
        return platform.processor()


def _enabled() -> bool:
    return os.environ.get("SLIPSTREAM_NATIVE") != "0"


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr or b"").decode(errors="replace").strip()[-400:]
    return str(error)


SIGNATURES: dict[str, list[Any]] = {
    "slip_add_rms_norm": [POINTER, POINTER, POINTER, POINTER, POINTER, FLOAT, INT, INT],
    "slip_norm_heads": [POINTER, POINTER, POINTER, FLOAT, INT, INT, INT, INT],
    "slip_rope": [POINTER, POINTER, POINTER, INT, INT, INT, INT, INT],
    "slip_silu_and_mul": [POINTER, POINTER, INT, INT],
    "slip_gelu_tanh_and_mul": [POINTER, POINTER, INT, INT],
    "slip_write_cache": [POINTER, POINTER, POINTER, POINTER, POINTER, INT, INT, INT, INT],
    "slip_attend": [POINTER] * 8 + [FLOAT] * 2 + [INT] * 8,
    "slip_skinny_gemm": [POINTER] * 3 + [INT] * 4,
    "slip_has_gemm": [],
    "slip_gemm": [POINTER] * 3 + [INT] * 4,
    "slip_low_bit": [POINTER] * 5 + [INT] * 4,
    "slip_low_bit_pack": [POINTER] * 4 + [INT] * 4,
    "slip_low_bit_lookup": [POINTER] * 5 + [INT] * 4,
    "slip_gather_inputs": [POINTER],
    "slip_argmax": [POINTER] * 3 + [INT] * 2,
    "slip_decode_layers": [POINTER] * 8 + [INT],
}
# return 0 if they fail
_RETURNING = {"slip_has_gemm", "slip_gemm", "slip_low_bit", "slip_low_bit_lookup", "slip_decode_layers"}


# WeightRows: adjacent rows of a weight in the form that the C kernels read.


class RowLayout(IntEnum):
    """Storage formats of rows; mirrors the enum of native_low_bit_layout.h."""

    FLOAT32 = 0
    FOUR_BITS = 1
    EIGHT_BITS = 2
    Q4_K = 3
    Q5_K = 4
    Q6_K = 5
    BFLOAT16 = 6
    Q4_0 = 7


class WeightRows(NamedTuple):
    data: torch.Tensor  # [rows, columns] float32 or bfloat16, or interleaved blocks (ops/gemm/low_bit/interleaved.py)
    num_rows: int
    layout: RowLayout = RowLayout.FLOAT32
    scales: torch.Tensor | None = None  # low-bit only
    offsets: torch.Tensor | None = None  # FOUR_BITS only

    @property
    def is_low_bit(self) -> bool:
        return self.layout not in (RowLayout.FLOAT32, RowLayout.BFLOAT16)


def dense_rows(weight: torch.Tensor) -> WeightRows | None:
    """None if the C kernels cannot read this weight."""
    layout = LAYOUTS.get(weight.dtype)
    if layout is None or not weight.is_cpu or not weight.is_contiguous():
        return None
    return WeightRows(weight, len(weight), layout)


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts one below the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


LAYOUTS = {torch.float32: RowLayout.FLOAT32, torch.bfloat16: RowLayout.BFLOAT16}
"""Weights that are multiplied by float32 activations as they are."""
