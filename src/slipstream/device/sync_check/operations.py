"""Torch operations that make the host wait."""

from __future__ import annotations

from typing import Any

import torch

# The shapes of their results depend on values of their inputs.
_READS = {
    "aten::_local_scalar_dense": "item()",
    "aten::nonzero": "nonzero()",
    "aten::masked_select": "masked_select()",
    "aten::repeat_interleave": "repeat_interleave() without output_size",
    "aten::unique_dim": "unique()",
    "aten::unique_consecutive": "unique_consecutive()",
    "aten::_unique": "unique()",
    "aten::_unique2": "unique()",
    "aten::bincount": "bincount()",
    "aten::equal": "equal()",
}


def waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cpu: bool) -> str | None:
    """The name of an operation that makes the host wait, or None. `cpu`: the CPU is treated as the device."""
    name = func._schema.name
    if name == "aten::repeat_interleave":
        # the overload that makes indices from counts; the others call it
        return _READS[name] if kwargs.get("output_size") is None and (cpu or not args[0].is_cpu) else None
    if name in _READS:
        return _READS[name] if cpu or not args[0].is_cpu else None
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        on_device = cpu or any(not tensor.is_cpu for tensor in (args[0], *masks))
        return "a mask as an index" if masks and on_device else None
    if name == "aten::_to_copy":
        target = kwargs.get("device") or args[0].device
        # a non_blocking copy to the host allocates pinned memory itself
        host = args[0] if args[0].is_cpu else None
        return copy_waits(args[0].device, target, bool(kwargs.get("non_blocking")), host)
    if name == "aten::copy_":
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        host = args[1] if args[1].is_cpu else args[0]
        return copy_waits(args[1].device, args[0].device, non_blocking, host)
    return None


def copy_waits(source: torch.device, target: torch.device, non_blocking: bool, host: torch.Tensor | None) -> str | None:
    """`host`: the tensor in host memory, if it exists already. Pageable or strided memory cannot be copied
    asynchronously: torch copies through a pageable buffer."""
    if source.type == target.type or "meta" in (source.type, target.type):
        return None
    direction = f"copy from {source.type} to {target.type}"
    if not non_blocking:
        return f"{direction} without non_blocking"
    if host is None:
        return None
    side = "from" if source.type == "cpu" else "into"
    if not host.is_contiguous():
        return f"{direction} {side} strided memory"
    return None if host.is_pinned() else f"{direction} {side} memory that is not pinned"
