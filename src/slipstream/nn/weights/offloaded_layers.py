"""OffloadedLayers: the weights of some layers in host memory, copied to the device one layer ahead (`cpu_offload_gb`).

The last layers of the model are offloaded, so that the copies begin while the layers before them run. Two device
buffers take turns: while a layer runs on one of them, the next layer is copied to the other. Parameters are views of
the buffers, whose addresses never change, and copies and events are captured with the step.

Until `start`, parameters are the host memory itself, at the address that the device has for it: weights are loaded into
it, and the first dry runs read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import nn

from slipstream.base.errors import InvalidOption
from slipstream.device.streams import new_stream
from slipstream.device.sync_check import sync_allowed

_ALIGN = 256  # bytes
_NUM_BUFFERS = 2


def count_offloaded(layer_bytes: Sequence[int], num_bytes: int) -> int:
    """How many of the last layers must be offloaded to save `num_bytes` of the device's memory, buffers included."""
    if num_bytes <= 0:
        return 0
    best = 0
    for count in range(1, len(layer_bytes) + 1):
        best = max(best, saved_bytes(layer_bytes, count))
        if saved_bytes(layer_bytes, count) >= num_bytes:
            return count
    raise InvalidOption(
        f"cpu_offload_gb is {num_bytes / 2**30:.2f}, and at most {best / 2**30:.2f} GiB of the weights can leave the "
        "device: embeddings and two buffers of a layer stay; lower it"
    )


def saved_bytes(layer_bytes: Sequence[int], num_offloaded: int) -> int:
    """Bytes of the device's memory that streaming saves. `layer_bytes`: of all layers."""
    offloaded = list(layer_bytes[len(layer_bytes) - num_offloaded :])
    return sum(offloaded) - min(num_offloaded, _NUM_BUFFERS) * max(offloaded, default=0)


def parameter_bytes(layers: nn.ModuleList) -> list[int]:
    """Bytes of each layer in its buffer."""
    return [_layout(layer)[1] for layer in layers]


class OffloadedLayers:
    def __init__(self, layers: nn.ModuleList, num_offloaded: int, device: torch.device) -> None:
        """`layers` are on the meta device. Allocates the memory of the last `num_offloaded`: that of the host, and the
        buffers."""
        self._device = device
        self._offloaded = list(layers)[len(layers) - num_offloaded :]
        self._is_started = False
        self._hosts = [_pinned(_layout(layer)[1], device) for layer in self._offloaded]
        size = max(len(host) for host in self._hosts)
        num_buffers = min(num_offloaded, _NUM_BUFFERS)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(num_buffers)]
        for layer, host in zip(self._offloaded, self._hosts, strict=True):
            _bind(layer, _seen_by(device, host))
        self._copies = new_stream(device) if device.type == "cuda" else None
        if device.type == "cuda":
            weakref.finalize(self, _unpin, self._hosts)

    @property
    def num_bytes(self) -> int:
        """Bytes that a step copies to the device."""
        return sum(map(len, self._hosts))

    def start(self) -> None:
        """The weights are loaded: from now on layers run on the buffers. No step may be running."""
        for number, layer in enumerate(self._offloaded):
            _bind(layer, self._buffers[number % len(self._buffers)])
        self._is_started = True

    def in_turn(self, layers: nn.ModuleList) -> Iterator[tuple[int, nn.Module]]:
        """Device: number and layer, as `enumerate`. An offloaded layer is on the device when it is yielded. The caller
        launches it before it takes the next."""
        if not self._is_started:
            yield from enumerate(layers)
            return
        order = [index for index, layer in enumerate(self._offloaded) if layer in layers]  # a dry run may have fewer
        current = torch.cuda.current_stream(self._device) if self._copies is not None else None
        arrived = [self._copy(index, current) for index in order[: len(self._buffers)]]
        ahead, done = len(arrived), 0
        for number, layer in enumerate(layers):
            is_offloaded = done < len(order) and layer is self._offloaded[order[done]]
            if is_offloaded and current is not None:
                current.wait_event(arrived[done])
            yield number, layer
            if is_offloaded:
                done += 1
                if ahead < len(order):  # into the buffer of the layer that was just launched
                    arrived.append(self._copy(order[ahead], current))
                    ahead += 1

    def _copy(self, index: int, after: torch.cuda.Stream | None) -> torch.cuda.Event:
        """Copy a layer to its buffer, after all work that is queued on the stream `after`."""
        host, buffer = self._hosts[index], self._buffers[index % len(self._buffers)]
        if self._copies is None or after is None:
            buffer[: len(host)].copy_(host)
            return None  # type: ignore[return-value]
        self._copies.wait_stream(after)
        with torch.cuda.stream(self._copies):
            buffer[: len(host)].copy_(host, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._copies)
        return event


def _layout(layer: nn.Module) -> tuple[list[int], int]:
    """Offsets of the parameters of a layer in its buffer, and their size together."""
    sizes = [-(-each.numel() * each.element_size() // _ALIGN) * _ALIGN for each in layer.parameters()]
    ends = list(accumulate(sizes, initial=0))
    return ends[:-1], ends[-1]


def _bind(layer: nn.Module, memory: torch.Tensor) -> None:
    """Let the parameters of a layer be views of `memory`, bytes on the device."""
    offsets = iter(_layout(layer)[0])
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            first, size = next(offsets), parameter.numel() * parameter.element_size()
            view = memory[first : first + size].view(parameter.dtype).view(parameter.shape)
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(view, requires_grad=False))
            else:
                parameter.data = view


def _pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Host memory of exactly this size; torch's own pinned allocator rounds up to a power of two."""
    memory = torch.empty(max(num_bytes, 1), dtype=torch.uint8)
    if device.type == "cuda":
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(error) != 0:
            raise MemoryError(f"{memory.nbytes / 2**30:.2f} GiB of host memory could not be pinned: {error}")
    return memory


def _unpin(memories: list[torch.Tensor]) -> None:
    for memory in memories:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class _HostPointer:
    """Pinned host memory in the form from which torch makes a CUDA tensor without a copy."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (len(memory),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def _seen_by(device: torch.device, host: torch.Tensor) -> torch.Tensor:
    if device.type == "cpu":
        return host
    with sync_allowed("at start; it copies nothing"):
        return torch.as_tensor(_HostPointer(host), device=device)
