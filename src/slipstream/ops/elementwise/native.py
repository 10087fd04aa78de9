"""RMS norm with the C kernels; with the reference for inputs that the kernels do not take."""

from __future__ import annotations

import ctypes

import torch

from slipstream.ops.elementwise import reference
from slipstream.ops.elementwise.reference import KeptTokens, StepInputs, StepRows, keep_ids_
from slipstream.ops.platform import native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not native.serves(x) or weight.dtype is not x.dtype:
        return reference.rms_norm(x, weight, eps)
    if weight.dim() == 2 and x.stride()[1:] == (x.shape[2], 1):
        return _norm_heads(x, weight, eps)
    if weight.dim() != 1 or not x.is_contiguous():
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=torch.float32)
    _run(x, None, weight, x, out, eps)
    return out


def _norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, heads, size], weight [heads, size]."""
    library = native.library()
    assert library is not None and weight.is_contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    library.slip_norm_heads(x.data_ptr(), weight.data_ptr(), out.data_ptr(), eps, *x.shape, x.stride(0))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    fits = x.is_contiguous() and residual.is_contiguous() and x.dtype is residual.dtype is weight.dtype
    if not fits or not native.serves(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    total, out = torch.empty(x.shape, dtype=torch.float32), torch.empty(x.shape, dtype=torch.float32)
    _run(x, residual, weight, total, out, eps)
    return out, total


def _run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    library = native.library()
    assert library is not None
    size = x.shape[-1]
    library.slip_add_rms_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        total.data_ptr(),
        out.data_ptr(),
        eps,
        x.numel() // size,
        size,
    )


# Gated activations with the C kernels; with the reference for inputs that the kernels do not take.


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if not gate_up.is_contiguous() or not native.serves(gate_up):
        return reference.silu_and_mul(gate_up)
    return _run_activation("slip_silu_and_mul", gate_up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if not gate_up.is_contiguous() or not native.serves(gate_up):
        return reference.gelu_tanh_and_mul(gate_up)
    return _run_activation("slip_gelu_tanh_and_mul", gate_up)


def _run_activation(name: str, gate_up: torch.Tensor) -> torch.Tensor:
    size = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=torch.float32)
    getattr(native.library(), name)(gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size)
    return out


# Step inputs with the C kernel, one call instead of a dozen small torch operations; else with the reference.


class _Inputs(ctypes.Structure):
    """Mirrors `Inputs` of step_inputs.c."""

    _fields_ = [
        *((name, native.POINTER) for name in ("computed", "next_tokens", "tables")),
        *((name, native.POINTER) for name in ("rows", "counts", "token_rows", "offsets", "host_ids")),
        *((name, native.POINTER) for name in ("ids", "positions", "lengths", "slots", "pages")),
        *((name, native.INT) for name in ("num_tokens", "num_rows", "num_groups", "num_table_rows")),
        *((name, native.INT) for name in ("next_stride", "pages_per_row", "page_size", "width", "advance")),
    ]


def gather_inputs(
    computed: torch.Tensor,
    next_tokens: torch.Tensor,
    tables: torch.Tensor,
    page_size: int,
    width: int,
    step: StepRows,
    out: StepInputs | None = None,
    kept: KeptTokens | None = None,
    *,
    advance: bool = False,
) -> StepInputs:
    """Same arguments and result as the reference."""
    library = native.library()
    if library is None or out is not None or type(computed) is not torch.Tensor or not computed.is_cpu:
        return reference.gather_inputs(
            computed, next_tokens, tables, page_size, width, step, out, kept, advance=advance
        )
    rows, counts, token_rows, offsets, host_ids = step
    num_groups, num_table_rows, pages_per_row = tables.shape
    num_rows = rows.shape[0]
    num_tokens = num_rows if token_rows is None else token_rows.shape[0]
    assert computed.is_contiguous() and next_tokens.is_contiguous() and tables.is_contiguous()
    made = torch.empty(2 * num_tokens + num_groups * (num_tokens + num_rows * width), dtype=torch.int64)
    if type(made) is not torch.Tensor:  # under FakeTensorMode new tensors have no memory, and the engine's state has
        return reference.gather_inputs(
            computed, next_tokens, tables, page_size, width, step, out, kept, advance=advance
        )
    lengths = torch.empty(num_rows, dtype=torch.int64)  # memory of its own: it is kept longer than the others
    ids, positions, slots, pages = made.split_with_sizes(
        (num_tokens, num_tokens, num_groups * num_tokens, num_groups * num_rows * width)
    )
    arguments = _Inputs(
        computed.data_ptr(),
        next_tokens.data_ptr(),
        tables.data_ptr(),
        *(_address(part) for part in (rows, counts, token_rows, offsets, host_ids)),
        *(part.data_ptr() for part in (ids, positions, lengths, slots, pages)),
        num_tokens,
        num_rows,
        num_groups,
        num_table_rows,
        next_tokens.shape[1],
        pages_per_row,
        page_size,
        width,
        int(advance),
    )
    library.slip_gather_inputs(ctypes.addressof(arguments))
    inputs = StepInputs(
        ids, positions, lengths, slots.view(num_groups, num_tokens), pages.view(num_groups, num_rows, width)
    )
    if kept is not None:
        keep_ids_(kept, inputs, rows if token_rows is None else token_rows)
    return inputs


def _address(part: torch.Tensor | None) -> int | None:
    if part is None:
        return None
    assert part.is_contiguous(), "the kernel reads contiguous tensors"
    return part.data_ptr()
