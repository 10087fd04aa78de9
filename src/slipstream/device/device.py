"""Device: everything that differs between the CPU and a CUDA GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.base.errors import InvalidOption
from slipstream.base.host import available_memory, num_cores, total_memory
from slipstream.config.memory import Machine
from slipstream.config.options import DEVICES, unknown_device
from slipstream.device.memory_pool import HostRegion, MemoryPool
from slipstream.device.peer_memory import CudaExport, CudaPeer, ExportedMemory, PeerMemory
from slipstream.device.streams import CudaStream, DeviceWork, InlineStream, Stream, ThreadedStream, new_stream

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
T = TypeVar("T")


class Pools(NamedTuple):
    """Memory that sleep mode releases."""

    weights: MemoryPool
    cache: MemoryPool

    def by_tag(self, tag: str) -> MemoryPool:
        return self.weights if tag == "weights" else self.cache


class Device:
    """One device and its streams: `compute` runs steps, `copy` copies results to the host at the same time."""

    kind = "cpu"
    can_pin = False
    can_graph = False
    warms_up = False  # whether kernels are compiled and steps captured before the first request

    def __init__(self, depth: int, num_threads: int) -> None:
        keep_freed_memory()
        self.torch_device = torch.device("cpu")
        self.pools: Pools | None = None
        self.depth = depth
        self.num_threads = num_threads
        self.compute: Stream
        self.copy: Stream
        # one thread runs all kernels: two OpenMP pools compete for few cores
        enter = partial(enter_for_good, num_threads)
        if depth == 0:
            enter()
            self.compute = self.copy = InlineStream()
            return
        self.compute = self.copy = ThreadedStream("slipstream-device", enter)
        self.run_and_wait(lambda: None)  # the thread has its state

    def engine_state(self) -> AbstractContextManager[None]:
        """The state of torch for a call that steps an engine on this device, in a thread that is not the engine's."""
        return engine_state(self._inline_threads())

    def enter_thread(self) -> None:
        """The same for a thread of the engine's own, for good."""
        enter_for_good(self._inline_threads())

    def _inline_threads(self) -> int | None:
        """Threads of kernels that run in the thread that steps; None if they run elsewhere."""
        return self.num_threads if isinstance(self.compute, InlineStream) else None

    def open_stream(self) -> Stream:
        """A stream for copies that results need not wait for. A CPU copies in its one stream."""
        return self.copy

    def host_buffer(self, num_bytes: int) -> tuple[Bytes, torch.Tensor]:
        """Host memory for copies to and from the device, as a numpy array and as a tensor of the same memory."""
        region = HostRegion(num_bytes)
        return region.array, region.data

    def large_host_buffer(self, num_bytes: int, file: int | None = None) -> tuple[Bytes, torch.Tensor]:
        """As `host_buffer`, of exactly this size: torch rounds pinned memory up to a power of two. `file`: the
        descriptor of the memory, if other processes share it. Raises MemoryError if there is less, or if it cannot be
        pinned."""
        if file is None:
            return self.host_buffer(num_bytes)
        array: Bytes = np.frombuffer(mmap.mmap(file, num_bytes), np.uint8)
        return array, torch.from_numpy(array)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros that take memory page by page at the first write. torch.zeros would write all of it now, and so may
        np.zeros: a heap that keeps freed memory has none of which it knows that it is zero."""
        return HostRegion(math.prod(shape) * dtype.itemsize).data.view(dtype).view(shape)

    def export_memory(self, num_bytes: int) -> ExportedMemory:
        """Device memory that other processes of this host and user can open."""
        raise NotImplementedError(f"other processes cannot open memory of the device {self.kind}")

    def open_memory(self, handle: bytes) -> PeerMemory:
        """Memory that another process has exported. In any thread. Raises OSError if this process cannot open it."""
        raise NotImplementedError(f"{self.kind} opens no memory of other processes")

    def enable_sleep(self) -> Pools:
        """From now on weights and caches are allocated in pools, which sleep mode releases."""
        if self.pools is None:
            self.pools = Pools(MemoryPool(self.torch_device), MemoryPool(self.torch_device))
        return self.pools

    def release(self, tag: str, *, keep: bool) -> None:
        """Give back the memory of weights or kv_cache. `keep`: its content is copied to host memory first."""
        assert self.pools is not None
        self.run_and_wait(lambda: None)
        self.pools.by_tag(tag).release(keep=keep)

    def map(self, tag: str) -> None:
        """Undo `release`, at the same addresses."""
        assert self.pools is not None
        self.pools.by_tag(tag).map()

    def profile(self, folder: Path, **how: Any) -> TorchProfiler:
        """Start to record operations. `how`: arguments of torch.profiler.profile."""

        return TorchProfiler(self.run_and_wait, self.kind, folder, **how)

    def cache_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros for a KV cache or recurrent states."""
        return self.zeros(shape, dtype) if self.pools is None else self.pools.cache.zeros(shape, dtype)

    def run_and_wait(self, work: Callable[[], T]) -> T:
        """Run `work` after all queued work, and wait for its end. Not while requests are served."""
        results: list[T] = []
        errors: list[Exception] = []  # an error inside the stream would end the device

        def run() -> None:
            try:
                results.append(work())
            except Exception as error:
                errors.append(error)

        self.compute.run(run)
        self.compute.record().wait()
        self.copy.record().wait()
        if errors:
            raise errors[0]
        return results[0]

    def before_reuse(self, buffer: Bytes) -> None:
        """Called before a buffer is written again; a test device poisons it here."""

    def wait_until_idle(self) -> None:
        """During start-up: wait until all work on all streams is done."""

    def free_memory(self) -> int | None:
        """Free bytes of device memory, after all queued work has run; None if the device uses host memory."""
        return None

    def capture(self, work: Callable[[], T]) -> tuple[DeviceWork, T]:
        """Capture what `work` launches, without running it. Returns the replay function, and the result that it writes.

        Raises RuntimeError if the capture fails; then `work` can still be run.
        """
        raise NotImplementedError(f"{self.kind} has no graphs")

    def close(self) -> None:
        self.compute.close()
        if self.copy is not self.compute:
            self.copy.close()


class CudaDevice(Device):
    """One CUDA GPU. Results are copied on a stream of their own; host buffers are pinned if the platform allows it."""

    kind = "cuda"
    can_graph = True
    warms_up = True

    def __init__(self, depth: int) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.pools: Pools | None = None
        self.depth = depth
        self.num_threads = 1
        self.can_pin = _pinning_works()
        torch.set_grad_enabled(False)
        self.compute: CudaStream = CudaStream(new_stream())
        self.copy: CudaStream = CudaStream(new_stream())
        self._opened: list[CudaStream] = []
        self._registered: list[torch.Tensor] = []
        self._graph_memory = torch.cuda.graph_pool_handle()  # shared: graphs of one stream never run at the same time

    def open_stream(self) -> Stream:
        stream = CudaStream(new_stream())
        self._opened.append(stream)
        return stream

    def close(self) -> None:
        super().close()
        for stream in self._opened:
            stream.close()
        for tensor in self._registered:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._registered.clear()

    def large_host_buffer(self, num_bytes: int, file: int | None = None) -> tuple[Bytes, torch.Tensor]:
        array: Bytes = np.frombuffer(mmap.mmap(-1 if file is None else file, num_bytes), np.uint8)
        tensor = torch.from_numpy(array)
        if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)):
            raise MemoryError(f"{num_bytes} bytes of host memory cannot be pinned")
        self._registered.append(tensor)
        return array, tensor

    def host_buffer(self, num_bytes: int) -> tuple[Bytes, torch.Tensor]:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self.can_pin)
        return tensor.numpy(), tensor

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def export_memory(self, num_bytes: int) -> ExportedMemory:
        return CudaExport(num_bytes, self.torch_device)

    def open_memory(self, handle: bytes) -> PeerMemory:
        return CudaPeer(handle, self.torch_device)

    def wait_until_idle(self) -> None:
        # not the whole device: that would break another engine's capture
        for stream in (torch.cuda.current_stream(self.torch_device), self.compute.stream, self.copy.stream):
            stream.synchronize()

    def release(self, tag: str, *, keep: bool) -> None:
        super().release(tag, keep=keep)
        torch.cuda.empty_cache()

    def map(self, tag: str) -> None:
        super().map(tag)
        torch.cuda.synchronize(self.torch_device)  # restored on the default stream, and steps run on another

    def free_memory(self) -> int | None:
        self.wait_until_idle()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def capture(self, work: Callable[[], T]) -> tuple[DeviceWork, T]:
        graph = torch.cuda.CUDAGraph()
        # a garbage collection that frees another graph would break this capture
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self.compute.stream):
                # relaxed: a library used here for the first time allocates memory, which other modes forbid. A wait for
                # this stream is an error in every mode.
                graph.capture_begin(pool=self._graph_memory, capture_error_mode="relaxed")
                try:
                    result = work()
                    graph.capture_end()
                except BaseException:
                    self._end_spoilt_capture(graph)
                    raise
        finally:
            if collects:
                gc.enable()
        return graph.replay, result

    def _end_spoilt_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """Make the stream usable again, and restore the allocator."""
        with contextlib.suppress(RuntimeError):  # it repeats the error
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # what capture_end does at its end, unless it raised before
            torch._C._cuda_endAllocateToPool(self.torch_device.index, self._graph_memory)


def _pinning_works() -> bool:
    try:
        return torch.zeros(1, pin_memory=True).is_pinned()
    except RuntimeError:  # some platforms refuse, for example WSL
        return False


def detect_machine(kind: str) -> Machine:
    """The machine for `cpu`, `cuda` or `auto`: SLIPSTREAM_DEVICE if set, else a GPU if there is one."""
    is_rocm = torch.version.hip is not None  # ROCm names its GPUs cuda too
    has_cuda = torch.cuda.is_available() and not is_rocm
    if kind == "auto":
        kind = os.environ.get("SLIPSTREAM_DEVICE") or "auto"
        if kind not in DEVICES:
            raise unknown_device(kind, "SLIPSTREAM_DEVICE")
    if kind == "auto":
        kind = "cuda" if has_cuda else "cpu"
    if kind == "cuda" and is_rocm:
        raise InvalidOption(
            'device is cuda, and this torch is built for ROCm, whose GPUs are not supported; use device="cpu" or '
            "install a CUDA build of torch"
        )
    if kind == "cuda" and not has_cuda:
        raise InvalidOption(
            'device is cuda, and torch finds no CUDA GPU; use device="cpu" or install a CUDA build of torch'
        )
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info()
        multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        return Machine("cuda", free, total, num_cores(), ("bfloat16", "float16", "float32"), multiprocessors)
    # float32 even for bfloat16 checkpoints: our kernels are in float32. A CPU without bfloat16 instructions would be a
    # hundred times slower; one with AMX was slower too, in decode and in prefill (docs/performance.md)
    return Machine("cpu", available_memory(), total_memory(), num_cores(), ("float32",))


def seems_cuda(kind: str) -> bool:
    """Whether `detect_machine` will most likely find a GPU. Asking the driver takes a quarter of a second."""
    if kind == "auto":
        is_there = os.path.exists("/dev/nvidiactl") and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
        kind = os.environ.get("SLIPSTREAM_DEVICE") or "auto"
        if kind == "auto":
            kind = "cuda" if is_there else "cpu"
    return kind == "cuda" and torch.version.cuda is not None


def open_device(kind: str, depth: int, num_threads: int) -> Device:
    assert kind in ("cpu", "cuda"), f"there is no device {kind}"
    allow_forks()
    return CudaDevice(depth) if kind == "cuda" else Device(depth, num_threads)


# Freed host memory stays with the process, so that steps on a CPU do not fault in the same pages again and again.
#
# For torch on the GNU C library's allocator; `slipstream/__init__.py` sets the option of the allocator in ARM wheels.

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of options in malloc.h of the GNU C library
_KEPT = 1 << 29  # bytes at the end of a heap that are not given back to the system
# Heaps of threads are 64 MiB each. The last one is unmapped when it is empty and the one before it has this much room,
# whatever _KEPT says. With 64 MiB none would ever be unmapped.
_ROOM = 48 << 20
_LARGE = (1 << 30, 1 << 25)  # larger tensors have pages of their own, given back at once; old libraries take the second


def keep_freed_memory() -> None:
    """For the whole process. Settings by MALLOC_ variables of the environment stay; other C libraries have no such
    options."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        return
    set_option(_TRIM_THRESHOLD, _KEPT)
    set_option(_TOP_PAD, _ROOM)
    for size in _LARGE:
        if set_option(_MMAP_THRESHOLD, size):
            break


# TorchProfiler: records the operations of a device with torch's profiler, into a trace file.


class TorchProfiler:
    def __init__(self, run: Callable[[Callable[[], None]], None], kind: str, folder: Path, **how: Any) -> None:
        """`run`: runs a function in the thread of the device; `kind`: of the device; `how`: arguments of
        torch.profiler.profile."""
        self._run = run
        self._folder = folder
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == "cuda" else [])]
        self._profile = profile(activities=activities, **how)
        run(self._profile.start)  # it records the thread that starts it

    def stop(self, prefix: str = "") -> Path:
        """Writes a trace for ui.perfetto.dev, and returns its path."""
        self._run(self._profile.stop)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{prefix}{time.time_ns()}.pt.trace.json.gz"
        self._profile.export_chrome_trace(str(path))
        return path


# Torch's state in a thread that is the caller's: what engines need inside a call, and the caller's own afterwards.
#
# An LLM builds and steps its engine in the thread of the call, and the next lines of the caller may train a model.


@contextmanager
def engine_state(num_threads: int | None = None) -> Iterator[None]:
    """Inside, this thread has the state that an engine needs; afterwards it has its own. `num_threads`: threads of
    kernels that run in this thread; None leaves them as they are until someone sets them."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # its tensors could not be written later, outside of it
            stack.enter_context(torch.inference_mode(False))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.no_grad())
        if dtype is not torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        if num_threads is not None and num_threads != threads:
            torch.set_num_threads(num_threads)
        try:
            yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def enter_for_good(num_threads: int | None = None) -> None:
    """Sets the state of a thread that is the engine's own."""
    torch.set_grad_enabled(False)
    if num_threads is not None:
        of_others = torch.get_num_threads()  # also: this thread takes that number now, not at its first operation
        torch.set_num_threads(num_threads)
        # new threads of the process take the number that was set last, in whatever thread
        other = threading.Thread(target=torch.set_num_threads, args=(of_others,))
        other.start()
        other.join()


@functools.cache
def openmp_library() -> str | None:
    """Path of the GNU OpenMP runtime that torch has loaded; None if it uses another."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as entries:
            return next((each.split()[-1] for each in entries if "/libgomp" in each), None)
    except OSError:
        return None


@functools.cache
def allow_forks() -> None:
    """Before each fork, ends the OpenMP threads of the thread that forks: the child has none, and would wait for
    them forever. The next parallel operation starts them again."""
    if (path := openmp_library()) is not None and hasattr(os, "register_at_fork"):
        library = ctypes.CDLL(path)
        if hasattr(library, "omp_pause_resource_all"):
            os.register_at_fork(before=functools.partial(library.omp_pause_resource_all, _PAUSE_SOFT))


_PAUSE_SOFT = 1  # omp_pause_soft: values of threadprivate variables stay
