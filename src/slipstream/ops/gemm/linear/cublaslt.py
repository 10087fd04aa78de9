"""Autotuned cuBLASLt: for each GEMM shape of many rows on CUDA, the fastest algorithm that cuBLASLt offers.

cuBLASLt lists about eight algorithms for a GEMM, and torch takes the first. When large GEMMs run the GPU at its power
limit, another algorithm can be up to a seventh faster (H200, docs/log/). An engine records the GEMM shapes of its
largest step at start (`recording_gemms`) and times every algorithm for each shape (`autotune_recorded`). Later GEMMs of
these shapes use the fastest one. An algorithm that is fastest alone may take more power, which lowers the clock for all
kernels; so the best few are timed again under load, long enough for the clock to settle. Every algorithm accumulates in
float32 and does not use split-k. GEMMs of few rows that add to a residual use the first such algorithm, without timing.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import statistics
import threading
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import torch

from slipstream.device.sync_check import sync_allowed

MIN_ROWS = 1024
"""Rows from which shapes are tuned. A shorter GEMM ends before the clock reacts."""
UNSPLIT_ADD_ROWS = range(65, 257)
"""Rows of large decode steps. When a GEMM adds to a residual, the first algorithm without split-k takes up to a quarter
less time than the algorithm that torch takes (H200, docs/log/)."""

_MAX_ALGORITHMS = 16
_WORKSPACE_BYTES = 256
_ALIGNMENT = 256  # bytes; cuBLASLt assumes this alignment of a matrix when it lists algorithms
_TIMING_ROUNDS = 3
_CALLS_PER_TIMING = 4  # back to back: the device is busy when the start event is recorded
_WORTHWHILE = 0.99  # of the first algorithm's time; a smaller gain may be noise
_FINALIST_MARGIN = 1.06  # of the shortest time; algorithms within it are timed under load
_NUM_FINALISTS = 3
_MAX_LOAD_CALLS = 400  # GEMMs per finalist, half of them in the second pass
_LOAD_MS = 40.0  # limit on the time per finalist; the clock settles after 20 ms
_WARM_UP_RUNS = 2  # runs of one finalist that heat the device before the first comparison
_MIN_UNSPLIT_OUTPUTS = 4096  # fewer outputs fill too few multiprocessors without split-k
_SPLIT_ROWS = range(113, 161)  # split-k is faster for these rows if in > out

_Shape = tuple[torch.device, torch.dtype, int, int, int]  # rows, outputs, inputs
RecordedGemms = dict[_Shape, torch.Tensor]
"""A weight of each shape."""
Choices = tuple[tuple[str, int, int, int, int], ...]
"""dtype, rows, outputs, inputs; then the algorithm, 0: the one that torch takes."""
_tuned: dict[_Shape, LtGemm | None] = {}
_unsplit: dict[_Shape, LtGemm | None] = {}  # for UNSPLIT_ADD_ROWS; filled at the first use of a shape
_thread = threading.local()  # `recorded`: per thread, since another engine of this process may be serving
_warmed_up: set[torch.device] = set()


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """x [rows, in] times the transpose of weight [out, in]; None if the shape has no tuned algorithm."""
    gemm = _find(x, weight)
    if gemm is None:
        return None
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    gemm.run(gemm.best, x, weight, out)
    return out


def is_tuned(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `multiply` has an algorithm for this shape. Records the shape inside `recording_gemms`."""
    return _find(x, weight) is not None


def add_to(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Adds the GEMM to the residual in place; False, without a change, if the shape has no algorithm here."""
    if not residual.is_contiguous() or residual.data_ptr() % _ALIGNMENT:
        return False
    is_unsplit = len(x) in UNSPLIT_ADD_ROWS
    gemm = _find_unsplit(x, weight) if is_unsplit else _find(x, weight)
    if gemm is None:
        return False
    try:
        gemm.run(gemm.best, x, weight, residual, add=True)
    except CublasLtError:
        if not is_unsplit:
            raise
        _unsplit[_shape(x, weight)] = None  # cuBLASLt listed the algorithm but cannot run it
        return False
    return True


def _shape(x: torch.Tensor, weight: torch.Tensor) -> _Shape:
    num_out, num_in = weight.shape
    return x.device, x.dtype, len(x), num_out, num_in


def _find_unsplit(x: torch.Tensor, weight: torch.Tensor) -> LtGemm | None:
    num_out, num_in = weight.shape
    if num_out < _MIN_UNSPLIT_OUTPUTS or (num_in > num_out and len(x) in _SPLIT_ROWS):
        return None
    if not _is_eligible(x, weight) or not _is_hopper(x.device):
        return None
    shape = _shape(x, weight)
    if shape not in _unsplit:
        _unsplit[shape] = _list_algorithms(x, weight)
    return _unsplit[shape]


def _find(x: torch.Tensor, weight: torch.Tensor) -> LtGemm | None:
    recorded: RecordedGemms | None = getattr(_thread, "recorded", None)
    if len(x) < MIN_ROWS or not (_tuned or recorded is not None) or not _is_eligible(x, weight):
        return None
    shape = _shape(x, weight)
    if recorded is not None and shape not in _tuned:
        recorded[shape] = weight
    return _tuned.get(shape)


@contextlib.contextmanager
def recording_gemms() -> Iterator[RecordedGemms]:
    """Records the shapes of this thread's GEMMs that are not tuned yet."""
    before, _thread.recorded = getattr(_thread, "recorded", None), {}
    try:
        yield _thread.recorded
    finally:
        _thread.recorded = before


def autotune_recorded(recorded: RecordedGemms, chosen: Choices = ()) -> Choices:
    """Tunes every recorded shape and empties the record. Runs on the current stream; the host waits for the timings.
    `chosen`: what another rank found for the same shapes, on a GPU of the same kind. Returns all choices so far."""
    known = {(name, *sizes): best for name, *sizes, best in chosen}
    while recorded:
        shape, weight = recorded.popitem()
        device, dtype, num_rows, num_out, num_in = shape
        # random numbers: the equal rows of a dry run take less power than real inputs
        x = torch.empty(num_rows, num_in, dtype=dtype, device=device)
        x.normal_(generator=torch.Generator(device).manual_seed(0))
        best = known.get((str(dtype), num_rows, num_out, num_in))
        _tuned[shape] = choose(x, weight) if best is None else _with_algorithm(x, weight, best)
    return tuple((str(shape[1]), *shape[2:], gemm.best if gemm is not None else 0) for shape, gemm in _tuned.items())


def _with_algorithm(x: torch.Tensor, weight: torch.Tensor, algorithm: int) -> LtGemm | None:
    gemm = _list_algorithms(x, weight) if algorithm else None
    if gemm is None or algorithm >= gemm.num_algorithms:
        return None
    gemm.best = algorithm
    return gemm


def choose(x: torch.Tensor, weight: torch.Tensor) -> LtGemm | None:
    """The GEMM of this shape with its fastest algorithm; None if torch takes that one anyway or nothing is listed."""
    gemm = _list_algorithms(x, weight)
    if gemm is None:
        return None
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    algorithms = range(gemm.num_algorithms)
    times: list[list[float]] = [[] for _ in algorithms]
    for _ in range(_TIMING_ROUNDS):
        for algorithm in algorithms:
            times[algorithm].append(_time(gemm, algorithm, x, weight, out, _CALLS_PER_TIMING))
    medians = [statistics.median(each) for each in times]
    final = finalists(medians)
    if len(final) > 1:
        count = max(2, min(_MAX_LOAD_CALLS, math.ceil(_LOAD_MS / medians[final[0]])))
        if x.device not in _warmed_up:  # the device stays hot for later shapes
            _time(gemm, final[0], x, weight, out, _WARM_UP_RUNS * count)
            _warmed_up.add(x.device)
        loads: list[list[float]] = [[] for _ in algorithms]
        for algorithm in (*final, *reversed(final)):  # forward and back: the clock falls from run to run
            loads[algorithm].append(_time(gemm, algorithm, x, weight, out, max(_CALLS_PER_TIMING, count // 2)))
        medians = [statistics.mean(each) if each else math.inf for each in loads]
    gemm.best = fastest(medians)
    return gemm if gemm.best else None


def _list_algorithms(x: torch.Tensor, weight: torch.Tensor) -> LtGemm | None:
    library = load_library()
    if library is None:
        return None
    try:
        gemm = LtGemm(library, x, weight)
    except CublasLtError:
        return None
    return gemm if gemm.num_algorithms else None


def finalists(medians: list[float]) -> list[int]:
    """Indices of algorithms to time under load, fastest first. Algorithm 0, which torch takes, is always included."""
    near = [algorithm for algorithm, median in enumerate(medians) if median < _FINALIST_MARGIN * min(medians)]
    near = sorted(near, key=medians.__getitem__)[:_NUM_FINALISTS]
    return near if not near or 0 in near else [*near[: _NUM_FINALISTS - 1], 0]


def fastest(times: list[float]) -> int:
    """Index of the fastest algorithm; 0 unless another gains enough. A time of infinity means failed or not timed."""
    if not times:
        return 0
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] < _WORTHWHILE * times[0] else 0


class LtGemm:
    """GEMMs of one shape through cuBLASLt, with the algorithms that its heuristic lists, its first choice first."""

    def __init__(self, library: Any, x: torch.Tensor, weight: torch.Tensor) -> None:
        kind = {torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}[x.dtype]
        self._describe(library, x.device, (len(x), *weight.shape), kind, kind)
        self._algorithms = self._list_algorithms()

    @classmethod
    def of_fp8(cls, library: Any, device: torch.device, rows: int, num_out: int, num_in: int) -> LtGemm:
        """Of FP8 operands with a scale for each row of x and of the weight, to bfloat16. Before `run`: `set_scales`."""
        gemm = cls.__new__(cls)
        gemm._describe(library, device, (rows, num_out, num_in), _FLOAT8, _BFLOAT16)
        gemm._set_operation(_FAST_ACCUMULATION, ctypes.c_int8(1))
        for mode in (_SCALE_MODE_A, _SCALE_MODE_B):
            gemm._set_operation(mode, ctypes.c_int32(_SCALE_PER_ROW))
        anywhere = torch.empty(
            1, device=device, dtype=torch.float32
        )  # no algorithm is listed without scales; none is read
        gemm.set_scales(anywhere, anywhere)
        gemm._algorithms = gemm._list_algorithms()
        return gemm

    def _describe(
        self, library: Any, device: torch.device, sizes: tuple[int, int, int], kind: int, out_kind: int
    ) -> None:
        self.best = 0
        self._library = library
        self._handle = _handle(device)
        rows, num_out, num_in = sizes
        # cuBLASLt is column-major: our row is its column, so out = transpose(weight) times x
        self._operation = ctypes.c_void_p()
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(self._operation), _COMPUTE_FLOAT32, _FLOAT32))
        self._set_operation(_TRANSPOSE_A, ctypes.c_int32(1))
        inputs = [self._layout(kind, num_in, columns) for columns in (num_out, rows)]
        self._layouts = [*inputs, self._layout(out_kind, num_out, rows)]

    def set_scales(self, weight: torch.Tensor, x: torch.Tensor) -> None:
        """Of FP8 operands, in float32, for later runs."""
        self._set_operation(_SCALE_A, ctypes.c_void_p(weight.data_ptr()))
        self._set_operation(_SCALE_B, ctypes.c_void_p(x.data_ptr()))

    def _set_operation(self, attribute: int, value: Any) -> None:
        _set(self._library.cublasLtMatmulDescSetAttribute, self._operation, attribute, value)

    @property
    def num_algorithms(self) -> int:
        return len(self._algorithms)

    def run(
        self, algorithm: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, add: bool = False
    ) -> None:
        """Writes the GEMM to out, or adds it to out. Asynchronous, on the current stream."""
        first, second, third = self._layouts
        space = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
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
            ctypes.byref(self._algorithms[algorithm].algorithm),
            ctypes.c_void_p(space.data_ptr()),
            ctypes.c_size_t(_WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        _check(status)

    def _layout(self, kind: int, num_rows: int, num_columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(num_rows), ctypes.c_uint64(num_columns), ctypes.c_int64(num_rows)
        _check(self._library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, *sizes))
        return layout

    def _list_algorithms(self) -> list[_Algorithm]:
        """The algorithms without split-k that need no workspace but a counter."""
        preference = ctypes.c_void_p()
        _check(self._library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        workspace = ctypes.c_uint64(_WORKSPACE_BYTES)
        _set(self._library.cublasLtMatmulPreferenceSetAttribute, preference, _MAX_WORKSPACE, workspace)
        # no reduction scheme: some would accumulate split-k partials in the output, which has 16 bits
        _set(self._library.cublasLtMatmulPreferenceSetAttribute, preference, _REDUCTION_SCHEMES, ctypes.c_uint32(0))
        first, second, third = self._layouts
        algorithms, found = (_Algorithm * _MAX_ALGORITHMS)(), ctypes.c_int()
        shape = self._operation, first, second, third, third
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, *shape, preference, _MAX_ALGORITHMS, algorithms, ctypes.byref(found)
        )
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        return [] if status else list(algorithms[: found.value])


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


# constants of cublasLt.h
_BFLOAT16, _FLOAT16, _FLOAT32, _FLOAT8 = 14, 2, 0, 28
_COMPUTE_FLOAT32 = 68
_TRANSPOSE_A = 3
_SCALE_A, _SCALE_B, _FAST_ACCUMULATION, _SCALE_MODE_A, _SCALE_MODE_B = 17, 18, 25, 31, 32
_SCALE_PER_ROW = 3
_MAX_WORKSPACE, _REDUCTION_SCHEMES = 1, 3
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


def _is_eligible(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether cuBLASLt was asked about such operands: CUDA, 16 bits, contiguous, aligned."""
    is_16_bit = x.dtype is weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    aligned = (x.data_ptr() | weight.data_ptr()) % _ALIGNMENT == 0 and (weight.shape[0] | weight.shape[1]) % 8 == 0
    return x.is_cuda and is_16_bit and aligned and x.is_contiguous() and weight.is_contiguous()


def _time(gemm: LtGemm, algorithm: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, count: int) -> float:
    """Milliseconds per GEMM over the second half of `count` calls; infinity if the algorithm cannot run."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    skipped = count // 2
    try:
        for turn in range(count):
            if turn == skipped:
                begin.record()
            gemm.run(algorithm, x, weight, out)
        end.record()
    except CublasLtError:
        return math.inf
    with sync_allowed("cuBLASLt autotuning at start"):
        end.synchronize()
    return float(begin.elapsed_time(end)) / (count - skipped)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def load_library() -> Any:
    """The cuBLASLt that torch has loaded; None if it cannot be opened."""
    version = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version}")
    except OSError:
        return None


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(load_library().cublasLtCreate(ctypes.byref(handle)))
    return handle


def _set(setter: Any, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _check(setter(target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))


def _check(status: int) -> None:
    if status:
        raise CublasLtError(f"cuBLASLt returned status {status}")


class CublasLtError(RuntimeError):
    """cuBLASLt returned an error status."""


# FP8 GEMMs of many rows that add to a residual, through cuBLASLt: torch has none that adds.
#
# Each row of x and of the weight has a scale. For these cuBLASLt lists one algorithm, the one that torch takes.

FP8_MIN_ROWS = 257  # with fewer rows GEMMs are split, and the next norm adds the partial sums
_lock = threading.Lock()  # addresses of scales are attributes of the operation, which engines of this process share


def adds_fp8(x: torch.Tensor, num_out: int, num_in: int) -> bool:
    """Whether `add_fp8_to` has an algorithm for as many rows as x has, on its device."""
    return x.is_cuda and len(x) >= FP8_MIN_ROWS and _find_fp8(x.device, len(x), num_out, num_in) is not None


def add_fp8_to(
    residual: torch.Tensor,  # [rows, out] bfloat16
    q: torch.Tensor,  # [rows, in] FP8
    scales: torch.Tensor,  # [rows, 1] float32
    weight: torch.Tensor,  # [out, in] FP8
    weight_scales: torch.Tensor,  # [out, 1] float32
) -> bool:
    """Adds the GEMM to the residual in place; False, without a change, if cuBLASLt cannot."""
    is_aligned = (residual.data_ptr() | q.data_ptr() | weight.data_ptr()) % _ALIGNMENT == 0
    if not is_aligned or not residual.is_contiguous() or residual.dtype is not torch.bfloat16:
        return False
    gemm = _find_fp8(q.device, len(q), *weight.shape) if len(q) >= FP8_MIN_ROWS else None
    if gemm is None:
        return False
    with _lock:
        gemm.set_scales(weight_scales, scales)
        gemm.run(0, q, weight, residual, add=True)
    return True


@lru_cache(maxsize=1024)
def _find_fp8(device: torch.device, rows: int, num_out: int, num_in: int) -> LtGemm | None:
    library = load_library()
    if library is None:
        return None
    try:
        gemm = LtGemm.of_fp8(library, device, rows, num_out, num_in)
    except CublasLtError:
        return None
    return gemm if gemm.num_algorithms else None
