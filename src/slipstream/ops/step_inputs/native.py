"""Step inputs with the C kernel, one call instead of a dozen small torch operations; else with the reference."""

from __future__ import annotations

import ctypes

import torch

from slipstream.ops import native
from slipstream.ops.step_inputs import reference
from slipstream.ops.step_inputs.reference import KeptTokens, StepInputs, StepRows, keep_ids_


class _Inputs(ctypes.Structure):
    """Mirrors `Inputs` of native.c."""

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
