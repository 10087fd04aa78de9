"""Device memory that other processes of the same host and user can open and copy from.

On CUDA this is the driver's inter-process communication (IPC). The memory is an allocation of its own by `cuMemAlloc`:
a handle names a whole allocation, but tensors of torch are parts of segments, and sleep mode maps its memory again. A
CPU has no such memory; tests use files instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from slipstream.base.errors import NotEnoughMemory
from slipstream.device.streams import CudaStream, Event, new_stream


class ByteCopy(NamedTuple):
    """Bytes to copy."""

    source: int  # first byte in the memory of the peer
    target: int  # first byte in the own memory
    num_bytes: int


class ExportedMemory(Protocol):
    tensor: torch.Tensor  # device: [num_bytes] uint8

    def give_handle(self) -> bytes:
        """The handle with which another process opens the memory. From then on the memory is kept until this process
        ends: what happens to copies of others that read freed memory is undefined."""

    def close(self) -> None:
        """Free the memory after queued work, unless a handle was given. Nothing uses the tensor from then on."""


class PeerMemory(Protocol):
    """Memory of another process. It is closed with the last reference."""

    def copy(self, pieces: Sequence[ByteCopy], target: torch.Tensor) -> Event:
        """Queue copies to `target` [num_bytes] uint8 of this device. In any thread; nothing waits. Returns their
        end."""


class CudaExport:
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._allocation = _Allocation(num_bytes, device.index or 0)
        self.tensor = torch.as_tensor(self._allocation, device=device)  # keeps a reference to the allocation

    def give_handle(self) -> bytes:
        return self._allocation.give_handle()

    def close(self) -> None:
        self._allocation.free()


class _Allocation:
    """Freed by `free`, or with the last reference, unless a handle was given."""

    def __init__(self, num_bytes: int, index: int) -> None:
        self._index = index
        self._address = ctypes.c_uint64(0)
        _enter(index)
        status = _driver().cuMemAlloc_v2(ctypes.byref(self._address), ctypes.c_size_t(max(num_bytes, 1)))
        if status == _OUT_OF_MEMORY:
            raise NotEnoughMemory(
                f"cuda_ipc takes {num_bytes / 2**20:.0f} MiB of GPU memory, more than is free; lower kv_buffer_size or "
                "gpu_memory_utilization"
            )
        _check("cuMemAlloc", status)
        self.free = weakref.finalize(self, _free, index, self._address.value)
        self.free.atexit = False
        data = (self._address.value, False)
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": data, "version": 3}

    def give_handle(self) -> bytes:
        handle = _Handle()
        _enter(self._index)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
        self.free.detach()
        return bytes(handle.data)


class CudaPeer:
    def __init__(self, handle: bytes, device: torch.device) -> None:
        """Raises OSError if this process cannot open the memory: the handle is its own, or the devices cannot reach
        each other's memory."""
        if len(handle) != ctypes.sizeof(_Handle):
            raise OSError(f"a handle has {len(handle)} bytes; CUDA's have {ctypes.sizeof(_Handle)}")
        self._index = device.index or 0
        address = ctypes.c_uint64(0)
        _enter(self._index)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        self._address: int = address.value
        weakref.finalize(self, _close, self._index, self._address).atexit = False
        self._stream = CudaStream(new_stream(device))

    def copy(self, pieces: Sequence[ByteCopy], target: torch.Tensor) -> Event:
        _enter(self._index)
        stream, first = ctypes.c_void_p(self._stream.stream.cuda_stream), target.data_ptr()
        for piece in joined(pieces):
            to, source = ctypes.c_uint64(first + piece.target), ctypes.c_uint64(self._address + piece.source)
            _call("cuMemcpyAsync", to, source, ctypes.c_size_t(piece.num_bytes), stream)
        return self._stream.record()


def joined(pieces: Sequence[ByteCopy]) -> list[ByteCopy]:
    """The same bytes, with neighbours on both sides as one piece."""
    result: list[ByteCopy] = []
    for piece in sorted(pieces):
        last = result[-1] if result else ByteCopy(-1, -1, 0)
        if last.source + last.num_bytes == piece.source and last.target + last.num_bytes == piece.target:
            result[-1] = last._replace(num_bytes=last.num_bytes + piece.num_bytes)
        else:
            result.append(piece)
    return result


# Functions, types and constants of the driver's header, cuda.h

_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = ctypes.c_uint(1)  # also for memory of another GPU of this host


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * 64),)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """The context of a device that torch uses too."""
    torch.cuda.init()
    device, context = ctypes.c_int(0), ctypes.c_void_p(None)
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def _enter(index: int) -> None:
    """Threads that have called nothing of CUDA have no context."""
    _call("cuCtxSetCurrent", _context(index))


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_driver(), name)(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise OSError(f"{name} of the CUDA driver failed with status {status}")


def _free(index: int, address: int) -> None:
    with contextlib.suppress(Exception):  # the driver may be gone at the end of the process
        _enter(index)
        # it waits for queued work; torch.cuda.synchronize would break the capture of another engine
        _call("cuMemFree_v2", ctypes.c_uint64(address))


def _close(index: int, address: int) -> None:
    with contextlib.suppress(Exception):
        _enter(index)
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
