"""Gates of the delta rule on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, which describes the arguments."""
    num_tokens, heads = a.shape
    assert a.stride(1) == b.stride(1) == 1 and a.stride(0) == b.stride(0)
    g, beta = torch.empty((2, num_tokens, heads), dtype=torch.float32, device=a.device).unbind(0)
    block = triton.next_power_of_2(heads)
    rows = max(1, 512 // block)
    _gates_kernel[(triton.cdiv(num_tokens, rows),)](
        a, b, a_log, dt_bias, g, beta, num_tokens, a.stride(0), HEADS=heads, ROWS=rows, BLOCK=block, num_warps=4
    )
    return g, beta


# grid: (blocks of tokens,)
@triton.jit(do_not_specialize=["num_tokens"])
def _gates_kernel(
    a,
    b,
    a_log,
    dt_bias,
    g,
    beta,
    num_tokens,
    stride,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.arange(0, BLOCK)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_head = head < HEADS
    mask = (token < num_tokens)[:, None] & is_head[None, :]
    source = token[:, None] * stride + head[None, :]
    target = token[:, None] * HEADS + head[None, :]
    rate = tl.load(a_log + head, mask=is_head, other=0.0)[None, :]
    bias = tl.load(dt_bias + head, mask=is_head, other=0.0)[None, :]
    decay = log_decay(tl.load(a + source, mask=mask, other=0.0).to(tl.float32), rate, bias)
    tl.store(g + target, decay, mask=mask)
    tl.store(beta + target, tl.sigmoid(tl.load(b + source, mask=mask, other=0.0).to(tl.float32)), mask=mask)


@triton.jit
def log_decay(a, a_log, dt_bias):
    """-exp(a_log) softplus(a + dt_bias); past 20 softplus is its argument, as in torch."""
    x = a + dt_bias
    soft = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(a_log) * soft
