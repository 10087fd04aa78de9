"""MemoryPool: device memory that can be released and mapped again at the same addresses, for sleep mode.

Captured CUDA graphs and the C kernels hold addresses of weights and of the KV cache. So a pool reserves address ranges
once. `release` gives back the physical memory behind them, `map` puts new memory there, whose content is undefined.
On CUDA this is the driver's virtual memory management; on the CPU a private mapping, whose pages the kernel drops.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from slipstream.base.errors import NotEnoughMemory

_ALIGNMENT = 512  # bytes; kernels expect at least 16
_SHARED = 2**25  # bytes of a region for tensors smaller than that


class Region(Protocol):
    """An address range."""

    data: torch.Tensor  # [num_bytes] uint8; must not be used while the region is released

    def release(self) -> None: ...
    def map(self) -> None: ...


class MemoryPool:
    """Tensors share large regions. A region is freed with the pool and its last tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._regions: list[Region] = []
        self._shared: Region | None = None
        self._used = 0  # bytes of the shared region
        self._copies: list[torch.Tensor] = []  # content of each region on the host, while released
        self.is_mapped = True

    @property
    def num_bytes(self) -> int:
        return sum(len(region.data) for region in self._regions)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._take(num_bytes)[:num_bytes].view(dtype).view(shape)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = self.empty(shape, dtype)
        return found if self._device.type == "cpu" else found.zero_()  # new host memory is zero

    def release(self, *, keep: bool) -> None:
        """Gives back the memory. `keep`: its content is copied to host memory first. The device must be idle."""
        if not self.is_mapped:
            return
        is_host = self._device.type == "cpu"
        if keep and is_host:
            return  # the memory is host memory
        if keep:
            self._copies = [region.data.cpu() for region in self._regions]
        for region in self._regions:
            region.release()
        self.is_mapped = False

    def map(self) -> None:
        """Makes the memory usable again, with its content where that was kept."""
        if self.is_mapped:
            return
        for region in self._regions:
            region.map()
        for region, copy in zip(self._regions, self._copies, strict=False):
            region.data.copy_(copy)
        self._copies = []
        self.is_mapped = True

    def _take(self, num_bytes: int) -> torch.Tensor:
        if num_bytes >= _SHARED:
            return self._add(num_bytes).data
        if self._shared is None or self._used + num_bytes > len(self._shared.data):
            self._shared, self._used = self._add(_SHARED), 0
        first = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._shared.data[first : first + num_bytes]

    def _add(self, num_bytes: int) -> Region:
        region: Region = HostRegion(num_bytes) if self._device.type == "cpu" else CudaRegion(num_bytes, self._device)
        self._regions.append(region)
        return region


class HostRegion:
    """A private mapping: zeros that take memory page by page, at the first write. Released pages take none."""

    def __init__(self, num_bytes: int) -> None:
        try:
            self._mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes: {error}") from None
        with contextlib.suppress(AttributeError, OSError):  # for fewer misses of the TLB
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)[:num_bytes]
        self.data = torch.from_numpy(self.array)

    def release(self) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def map(self) -> None:
        pass


class CudaRegion:
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._range = _CudaRange(num_bytes, device)
        self.data = torch.as_tensor(self._range, device=device)  # keeps a reference to the range

    def release(self) -> None:
        self._range.release()

    def map(self) -> None:
        self._range.map()


class _CudaRange:
    """Reserved device addresses with one physical allocation behind them, or none. Freed with the last reference."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._driver = _driver()
        self._properties = _Properties(type=_PINNED, location=_Location(_DEVICE, device.index or 0))
        self._size, self._address, self._handle = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._is_mapped = False
        torch.cuda.init()  # the calls below need the context of the device
        unit = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), 0)
        self._size.value = -(-num_bytes // unit.value) * unit.value
        self._call("cuMemAddressReserve", ctypes.byref(self._address), self._size, ctypes.c_size_t(0), *_NO_HINT)
        self.map()
        shape, data = (self._size.value,), (self._address.value, False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": data, "version": 3}

    def map(self) -> None:
        properties, handle, zero = ctypes.byref(self._properties), ctypes.byref(self._handle), ctypes.c_uint64(0)
        self._call("cuMemCreate", handle, self._size, properties, zero)
        self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), self._handle, zero)
        access = _Access(self._properties.location, _READ_WRITE)
        self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
        self._is_mapped = True

    def release(self) -> None:
        self._is_mapped = False
        self._call("cuMemUnmap", self._address, self._size)
        self._call("cuMemRelease", self._handle)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the driver may be gone at the end of the process
            if self._is_mapped:
                torch.cuda.synchronize()
                self.release()
            if self._address.value:
                self._call("cuMemAddressFree", self._address, self._size)

    def _call(self, name: str, *arguments: Any) -> None:
        status: int = getattr(self._driver, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise NotEnoughMemory(
                f"{self._size.value / 2**20:.0f} MiB of GPU memory are missing; free memory of other programs, or "
                "lower gpu_memory_utilization"
            )
        if status:
            raise RuntimeError(f"{name} of the CUDA driver failed with status {status}")


# Types and constants of the driver's header, cuda.h

_PINNED, _DEVICE, _READ_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2
_NO_HINT = (ctypes.c_uint64(0), ctypes.c_uint64(0))  # address and flags


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
