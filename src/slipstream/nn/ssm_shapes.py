"""Shapes of state space mixers and short convolutions: sizes and options, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.contracts.cache_spec import STATE_CHUNK, StateField, replay_columns, ring_columns
from slipstream.nn.shapes import MixerShape
from slipstream.ops.recurrent.ssm import ROWS


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _replay(size: int, dtype: str, num_drafts: int) -> tuple[StateField, ...]:
    """The inputs of a scan that change its state, `size` numbers per token."""
    if not num_drafts:
        return ()
    return (StateField("replay", (replay_columns(num_drafts), size), dtype, is_saved=False),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape(MixerShape):
    """Mamba-2: a convolution over x, b and c, a scan with one decay per head, and a gated norm."""

    num_heads: int
    head_dim: int
    num_groups: int  # of b and c; a group serves num_heads / num_groups heads
    state_size: int
    conv_width: int
    name: str = "mamba"
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    dt_min: float = 0.0  # limits of the step size
    dt_max: float = float("inf")
    norm: Literal["gate_first", "norm_first", "none"] = "gate_first"  # whether the gate comes before or after the norm
    norm_groups: int = 1
    num_groups_of_all: int = 0  # with a shard: groups of the whole mixer
    num_wide_norm_groups: int = 0  # with a shard: norm groups of the whole mixer if each spans ranks; 0: none does
    part_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)  # of gate, x, b, c and dt

    @property
    def chunk_rounding(self) -> str:
        return "Mamba-2 layers"

    @property
    def size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Channels of b, and as many of c."""
        return self.num_groups * self.state_size

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: x, b and c."""
        return self.size + 2 * self.group_size

    def state_fields(self, dtype: str, num_drafts: int = 0) -> tuple[StateField, ...]:
        return (
            StateField("conv", (self.num_channels, ring_columns(self.conv_width, num_drafts)), dtype),
            StateField("ssm", (self.num_heads, self.head_dim, self.state_size), _wide(dtype)),
            *_replay(self.size + self.group_size + self.num_heads, dtype, num_drafts),  # x, b and dt
        )

    def elements_per_token(self, on_cpu: bool) -> int:
        """Projections, taps and output of the convolution, the scan's inputs and output, and the norm's copies; the
        last two in float32."""
        taps = 5 if on_cpu else 1
        return 2 * self.size + (1 + taps) * self.num_channels + 2 * (8 * self.size + 5 * self.num_heads)

    def elements_per_step(self, on_cpu: bool) -> int:
        """On the CPU: copies of the states of some rows, or the factors of a chunk. Kernels need none."""
        state = self.size * self.state_size
        chunk = self.num_heads * STATE_CHUNK * (4 * STATE_CHUNK + 6 * self.head_dim) + 6 * STATE_CHUNK * self.group_size
        return max(4 * ROWS * state, chunk + 5 * state) if on_cpu else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Shape(MixerShape):
    """Mamba-1: a convolution over x, a selective scan with a decay per channel and state, and a gate."""

    size: int
    state_size: int
    dt_rank: int
    conv_width: int
    name: str = "mamba"
    conv_bias: bool = True
    bias: bool = False  # of the first and last projection
    norms: bool = False  # RMS norms of dt, b and c (Jamba)

    def state_fields(self, dtype: str, num_drafts: int = 0) -> tuple[StateField, ...]:
        return (
            StateField("conv", (self.size, ring_columns(self.conv_width, num_drafts)), dtype),
            StateField("ssm", (self.size, self.state_size), _wide(dtype)),
            *_replay(2 * self.size + self.state_size, dtype, num_drafts),  # x, dt and b
        )

    def elements_per_token(self, on_cpu: bool) -> int:
        """Projections, taps and output of the convolution, step sizes, and the scan's inputs and output in float32."""
        taps = 5 if on_cpu else 1
        return (4 + taps) * self.size + 3 * (self.dt_rank + 2 * self.state_size) + 2 * 7 * self.size

    def elements_per_step(self, on_cpu: bool) -> int:
        """On the CPU: decays and inputs of a chunk, and what a round of the scan makes of them."""
        return 7 * STATE_CHUNK * self.size * self.state_size if on_cpu else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvShape(MixerShape):
    """c * convolution(b * x), where b, c and x are projections of the token (LFM2)."""

    size: int
    conv_width: int
    name: str = "conv"
    bias: bool = False  # of the projections and the convolution

    def state_fields(self, dtype: str, num_drafts: int = 0) -> tuple[StateField, ...]:
        return (StateField("conv", (self.size, ring_columns(self.conv_width, num_drafts)), dtype),)

    def elements_per_token(self, on_cpu: bool) -> int:
        """Projections, the convolution's input, taps and output, and the product."""
        return (11 if on_cpu else 7) * self.size
