"""The library's products of many rows on CUDA, each by the quickest of the ways the library offers.

cuBLAS lists some eight algorithms for a product, and torch takes the first. On a chip that large products drive to the
limit of its power another is quicker by up to a seventh (H200, docs/log/). So an engine that starts notes which
products its largest step makes (`recording_gemms`) and tries all ways for each (`autotune_recorded`); products of that
shape go the quickest way from then on. What is quickest alone may be so by taking more power, for which all pay with a
slower clock; so the best few are tried again under load, each for long enough that the clock follows. Every way sums in
float32 and keeps a sum in one piece. Few rows are added to a residual by the first of these ways, and nothing is timed
for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import statistics
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from slipstream.device.sync_check import sync_allowed

MIN_ROWS = 1024
"""With fewer a product is over before the clock follows it."""
FEW_ROWS = range(65, 257)
"""Of steps in which rows decode. Where torch adds their product to something, the first way that splits no sum takes up
to a quarter less than the one that torch takes (H200, docs/log/)."""

_MAX_WAYS = 16
_WORKSPACE = 256  # bytes
_ALIGNMENT = 256  # bytes; what the library takes for granted of a matrix when it lists ways
_ROUNDS = 3
_SHORT = 4  # products in a row: the device is at work when the clock is started, and does not wait for the host
_WORTH = 0.99  # of the first way's time; what gains less may be noise
_NEAR = 1.06  # of the least time; who is within it may be the best under load
_FINALISTS = 3
_LOAD = 400  # products that a finalist makes, half of them on the way back,
_LOAD_TIME = 40.0  # in no more than so many milliseconds: the clock follows after twenty
_HEATING = 2  # such turns get the device going before the first are compared
_MIN_OUTPUTS = 4096  # of few rows: with less there are too few sums for all multiprocessors, unless they are split
_BETTER_SPLIT = range(113, 161)  # rows, where inputs are more than outputs

_Shape = tuple[torch.device, torch.dtype, int, int, int]  # rows, outputs, inputs
Noted = dict[_Shape, torch.Tensor]
"""A weight for each."""
_chosen: dict[_Shape, Product | None] = {}
_unsplit: dict[_Shape, Product | None] = {}  # of few rows, made when they first come
_here = threading.local()  # `noted`, by this thread alone: another's engine may be answering meanwhile
_heated: set[torch.device] = set()


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """x [rows, in] times weight [out, in], transposed; None where no way was chosen."""
    product = _find(x, weight)
    if product is None:
        return None
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    product.run(product.best, x, weight, out)
    return out


def add_to(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """The same product, added to the residual; False where no way was chosen."""
    if not residual.is_contiguous() or residual.data_ptr() % _ALIGNMENT:
        return False
    is_few = len(x) in FEW_ROWS
    product = _find_unsplit(x, weight) if is_few else _find(x, weight)
    if product is None:
        return False
    try:
        product.run(product.best, x, weight, residual, add=True)
    except LibraryError:
        if not is_few:
            raise
        _unsplit[_shape(x, weight)] = None  # listed, never tried, and not to be had
        return False
    return True


def _shape(x: torch.Tensor, weight: torch.Tensor) -> _Shape:
    num_out, num_in = weight.shape
    return x.device, x.dtype, len(x), num_out, num_in


def _find_unsplit(x: torch.Tensor, weight: torch.Tensor) -> Product | None:
    num_out, num_in = weight.shape
    if num_out < _MIN_OUTPUTS or (num_in > num_out and len(x) in _BETTER_SPLIT):
        return None
    if not _is_plain(x, weight) or not _is_hopper(x.device):
        return None
    shape = _shape(x, weight)
    if shape not in _unsplit:
        _unsplit[shape] = _list_algorithms(x, weight)
    return _unsplit[shape]


def _find(x: torch.Tensor, weight: torch.Tensor) -> Product | None:
    noted: Noted | None = getattr(_here, "noted", None)
    if len(x) < MIN_ROWS or not (_chosen or noted is not None) or not _is_plain(x, weight):
        return None
    shape = _shape(x, weight)
    if noted is not None and shape not in _chosen:
        noted[shape] = weight
    return _chosen.get(shape)


@contextlib.contextmanager
def recording_gemms() -> Iterator[Noted]:
    """Meanwhile it is noted which shapes this thread's products have, of those not seen before."""
    before, _here.noted = getattr(_here, "noted", None), {}
    try:
        yield _here.noted
    finally:
        _here.noted = before


def autotune_recorded(noted: Noted) -> None:
    """Time the ways of what was noted, on the current stream; the host waits for it. Nothing is noted any more then."""
    while noted:
        shape, weight = noted.popitem()
        device, dtype, num_rows, _, num_in = shape
        # an engine starts with equal rows, which take less power than any that will come
        x = torch.empty(num_rows, num_in, dtype=dtype, device=device)
        x.normal_(generator=torch.Generator(device).manual_seed(0))
        _chosen[shape] = choose(x, weight)


def choose(x: torch.Tensor, weight: torch.Tensor) -> Product | None:
    """The product of such shapes with its quickest way; None if that is what torch takes anyway, or cannot be asked."""
    product = _list_algorithms(x, weight)
    if product is None:
        return None
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    ways = range(product.num_algorithms)
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(_ROUNDS):
        for way in ways:
            times[way].append(_time(product, way, x, weight, out, _SHORT))
    medians = [statistics.median(each) for each in times]
    final = finalists(medians)
    if len(final) > 1:
        count = max(2, min(_LOAD, math.ceil(_LOAD_TIME / medians[final[0]])))
        if x.device not in _heated:  # later shapes find it so
            _time(product, final[0], x, weight, out, _HEATING * count)
            _heated.add(x.device)
        loads: list[list[float]] = [[] for _ in ways]
        for way in (*final, *reversed(final)):  # there and back: whoever comes later finds a slower clock
            loads[way].append(_time(product, way, x, weight, out, max(_SHORT, count // 2)))
        medians = [statistics.mean(each) if each else math.inf for each in loads]
    product.best = quickest(medians)
    return product if product.best else None


def _list_algorithms(x: torch.Tensor, weight: torch.Tensor) -> Product | None:
    library = loaded()
    if library is None:
        return None
    try:
        product = Product(library, x, weight)
    except LibraryError:
        return None
    return product if product.num_algorithms else None


def finalists(medians: list[float]) -> list[int]:
    """Ways that may be the best under load, the quickest alone first; the library's own favourite is always heard."""
    near = [way for way, median in enumerate(medians) if median < _NEAR * min(medians)]
    near = sorted(near, key=medians.__getitem__)[:_FINALISTS]
    return near if not near or 0 in near else [*near[: _FINALISTS - 1], 0]


def quickest(times: list[float]) -> int:
    """The first way unless another is worth it. Those that failed or were not tried have a time of infinity."""
    if not times:
        return 0
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] < _WORTH * times[0] else 0


class Product:
    """Products of one shape, by any of the ways that the library lists for it, its favourite first."""

    def __init__(self, library: Any, x: torch.Tensor, weight: torch.Tensor) -> None:
        self.best = 0
        self._library = library
        self._handle = _handle(x.device)
        rows, (num_out, num_in) = len(x), weight.shape
        kind = {torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}[x.dtype]
        # to the library a row is a column: out = weight, transposed, times x
        self._operation = ctypes.c_void_p()
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(self._operation), _SUM_IN_FLOAT32, _FLOAT32))
        _set(library.cublasLtMatmulDescSetAttribute, self._operation, _TRANSPOSE_FIRST, ctypes.c_int32(1))
        self._layouts = [self._layout(kind, *sizes) for sizes in ((num_in, num_out), (num_in, rows), (num_out, rows))]
        self._ways = self._list_algorithms()

    @property
    def num_algorithms(self) -> int:
        return len(self._ways)

    def run(self, way: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """Device: out becomes the product, or that is added to it."""
        first, second, third = self._layouts
        space = torch.empty(_WORKSPACE, dtype=torch.uint8, device=x.device)
        status = self._library.cublasLtMatmul(
            self._handle,
            self._operation,
            ctypes.byref(_ONE),
            ctypes.c_void_p(weight.data_ptr()),
            first,
            ctypes.c_void_p(x.data_ptr()),
            second,
            ctypes.byref(_ONE if add else _ZERO),
            ctypes.c_void_p(out.data_ptr()),
            third,
            ctypes.c_void_p(out.data_ptr()),
            third,
            ctypes.byref(self._ways[way].algorithm),
            ctypes.c_void_p(space.data_ptr()),
            ctypes.c_size_t(_WORKSPACE),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        _check(status)

    def _layout(self, kind: int, num_rows: int, num_columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(num_rows), ctypes.c_uint64(num_columns), ctypes.c_int64(num_rows)
        _check(self._library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, *sizes))
        return layout

    def _list_algorithms(self) -> list[_Algorithm]:
        """Those that split no sum and need no memory but for a counter."""
        preference = ctypes.c_void_p()
        _check(self._library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        most = ctypes.c_uint64(_WORKSPACE)
        _set(self._library.cublasLtMatmulPreferenceSetAttribute, preference, _MAX_WORKSPACE, most)
        # else it lists some that add up parts of a sum in the output itself, which is of 16 bits
        _set(self._library.cublasLtMatmulPreferenceSetAttribute, preference, _SPLITS, ctypes.c_uint32(0))
        first, second, third = self._layouts
        ways, found = (_Algorithm * _MAX_WAYS)(), ctypes.c_int()
        shape = self._operation, first, second, third, third
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, *shape, preference, _MAX_WAYS, ways, ctypes.byref(found)
        )
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        return [] if status else list(ways[: found.value])


class _Algorithm(ctypes.Structure):
    """One result of the library's heuristics."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


# numbers of the library's interface
_BFLOAT16, _FLOAT16, _FLOAT32 = 14, 2, 0
_SUM_IN_FLOAT32 = 68
_TRANSPOSE_FIRST = 3
_MAX_WORKSPACE, _SPLITS = 1, 3
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


def _is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    sixteen_bits = x.dtype is weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    aligned = (x.data_ptr() | weight.data_ptr()) % _ALIGNMENT == 0 and (weight.shape[0] | weight.shape[1]) % 8 == 0
    return x.is_cuda and sixteen_bits and aligned and x.is_contiguous() and weight.is_contiguous()


def _time(product: Product, way: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, count: int) -> float:
    """Milliseconds of a product, in the second half of so many in a row; infinity where the way does not go."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    skipped = count // 2
    try:
        for turn in range(count):
            if turn == skipped:
                begin.record()
            product.run(way, x, weight, out)
        end.record()
    except LibraryError:
        return math.inf
    with sync_allowed("an engine that starts tries the library's ways"):
        end.synchronize()
    return float(begin.elapsed_time(end)) / (count - skipped)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def loaded() -> Any:
    """What torch has loaded already; None where it has another."""
    version = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version}")
    except OSError:
        return None


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(loaded().cublasLtCreate(ctypes.byref(handle)))
    return handle


def _set(setter: Any, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _check(setter(target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))


def _check(status: int) -> None:
    if status:
        raise LibraryError(f"cublasLt answered with status {status}")


class LibraryError(RuntimeError):
    """The library cannot do what it was asked."""
