"""Rope: rotary position embeddings, with the frequency scaling of long-context models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import RopeInfo
from slipstream.device.sync_check import sync_allowed
from slipstream.nn.layers.layer import Layer
from slipstream.nn.shapes import QueryScale
from slipstream.ops.attention import rope_table


class Rope(Layer):
    """A table of cosines and sines by position, shared by all layers and looked up once a step.

    LongRoPE has two sets of frequencies, chosen by the length of each request. Where an engine runs requests of both
    kinds, the table has a row per position for the long set, then a row per position of a short request for the short
    set: position p of a short request is row `num_positions` + p.

    A model that sees pictures has three positions for each token, of a frame, a row and a column, and each frequency
    turns by one of them.
    """

    def __init__(
        self,
        info: RopeInfo,
        head_dim: int,
        max_positions: int,
        num_positions: int,
        dtype: torch.dtype,
        *,
        switches: bool = True,
    ) -> None:
        """`max_positions`: the context of the model. `num_positions`: the context of the engine. `switches`: the batch
        selects one of two sets of frequencies for each token."""
        super().__init__()
        self.switches = switches
        lengths = [num_positions]
        if (short := info.short_length(num_positions)) is not None:
            if not switches:
                raise UnsupportedModel("rope scaling of kind longrope is supported for full attention, not for windows")
            lengths.append(short)
        self.parts = [(length, *rope_frequencies(info, head_dim, max_positions, length)) for length in lengths]
        rotary_dim = 2 * len(self.parts[0][1])
        self.register_buffer("table", torch.empty(sum(lengths), 2, rotary_dim, dtype=dtype))
        self._axes = _axes(info, rotary_dim // 2)
        self.register_buffer("axes", torch.empty(2 * len(self._axes), dtype=torch.int64))

    table: torch.Tensor
    axes: torch.Tensor  # of each value of a row: which of three positions turns it; empty: there is one position

    def fill(self) -> None:
        """Computes the table on the host, so that all devices rotate by the same angles to the last bit."""
        self.axes.copy_(torch.tensor(2 * self._axes, dtype=torch.int64))
        parts = [rope_table(frequencies, num, scale, self.table.dtype) for num, frequencies, scale in self.parts]
        self.table = torch.cat(parts).to(self.table.device)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the table, [T, 2, rotary dim]; of three rows for each token [3, T] the parts of each."""
        if rows.dim() == 1:
            return self.table.index_select(0, rows)
        assert len(self.axes), "the model has one position for each token"
        own = rows.index_select(0, self.axes).t()
        return self.table.gather(0, own.unsqueeze(1).expand(-1, 2, -1))


def _axes(info: RopeInfo, num_frequencies: int) -> list[int]:
    """Which of three positions turns each frequency: 0 frame, 1 row, 2 column; empty: the model has one position."""
    sections = info.factors.get("mrope_section")
    if not sections:
        return []
    if not isinstance(sections, list) or len(sections) != 3 or not all(isinstance(each, int) for each in sections):
        raise BadCheckpoint(f"mrope_section is {sections!r:.100}; it must have three whole numbers")
    if info.factors.get("mrope_interleaved"):
        return [axis if n < 3 * sections[axis] else 0 for n in range(num_frequencies) for axis in (n % 3,)]
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if len(axes) != num_frequencies:
        raise BadCheckpoint(f"mrope_section is {sections}, which are not {num_frequencies} frequencies together")
    return axes


# radians per position [rotary dim / 2], and the factor of cosines and sines
Frequencies = tuple[torch.Tensor, float]


def rope_frequencies(info: RopeInfo, head_dim: int, max_positions: int, num_positions: int) -> Frequencies:
    if info.kind not in KINDS:
        raise UnsupportedModel(
            f"rope scaling of kind {info.kind} is not supported; the supported ones are {', '.join(KINDS)}"
        )
    try:
        share = float(info.factors.get("partial_rotary_factor", 1.0))
        rotary_dim = head_dim if info.kind == "proportional" else int(head_dim * share)
        if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
            raise BadCheckpoint(f"rope rotates {rotary_dim} of {head_dim} values of a head; it must be an even number")
        # on the host even while a model is being laid out on the meta device: a few values, needed at once
        with torch.device("cpu"):
            plain = 1.0 / info.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
            frequencies, scale = KINDS[info.kind](plain, info, max_positions, num_positions)
        with sync_allowed("frequencies lie on the host while a model is laid out"):
            are_numbers = all(map(math.isfinite, [scale, *frequencies.tolist()]))
        if not are_numbers:
            raise BadCheckpoint(f"rope scaling of kind {info.kind} gives frequencies that are not finite numbers")
        return frequencies, scale
    except KeyError as missing:
        raise BadCheckpoint(f"rope scaling of kind {info.kind} lacks {missing} in config.json") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise BadCheckpoint(f"rope scaling of kind {info.kind} has a wrong value: {error}") from None


def _none(plain: torch.Tensor, info: RopeInfo, max_positions: int, num_positions: int) -> Frequencies:
    """No rotation: attention without positions, in models whose other layers encode the order of tokens."""
    return torch.zeros_like(plain), 1.0


def _default(plain: torch.Tensor, info: RopeInfo, max_positions: int, num_positions: int) -> Frequencies:
    return plain, 1.0


def _dynamic(plain: torch.Tensor, info: RopeInfo, max_positions: int, num_positions: int) -> Frequencies:
    """Dynamic NTK raises the base for contexts beyond `max_positions`. The engine runs no such context."""
    assert num_positions <= max_positions, f"{num_positions} positions of a dynamic rope made for {max_positions}"
    return plain, 1.0


def _linear(plain: torch.Tensor, info: RopeInfo, max_positions: int, num_positions: int) -> Frequencies:
    """Linear interpolation: all frequencies are divided by one factor."""
    return plain / info.factors["factor"], 1.0


def _proportional(plain: torch.Tensor, info: RopeInfo, max_positions: int, num_positions: int) -> Frequencies:
    """Frequencies of the whole head, of which only the first part is used; the other dimensions are not rotated."""
    num_rotated = int(float(info.factors.get("partial_rotary_factor", 1.0)) * len(plain))
    kept = torch.where(torch.arange(len(plain)) < num_rotated, plain, 0.0)
    return kept / float(info.factors.get("factor", 1.0)), 1.0


def _ntk(plain: torch.Tensor, info: RopeInfo, max_positions: int, num_positions: int) -> Frequencies:
    """NTK scaling as in GTE's checkpoints: a larger base, then all frequencies are divided by one factor."""
    factors = info.factors
    if factors.get("mixed_b") is not None:
        raise UnsupportedModel("rope scaling of kind ntk with mixed_b is not supported; a checkpoint without it is")
    factor, rotary_dim = float(factors["factor"]), 2 * len(plain)
    shares = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / (info.theta * factor) ** shares / factor ** (2 / rotary_dim), 1.0


def _llama3(plain: torch.Tensor, info: RopeInfo, max_positions: int, num_positions: int) -> Frequencies:
    """Llama 3: divides low frequencies by the factor and keeps high ones. Between, it blends by the number of rotations
    in the original context."""
    factors = info.factors
    low, high = factors["low_freq_factor"], factors["high_freq_factor"]
    turns = _original_length(info, max_positions) * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / factors["factor"], 1.0


def _yarn(plain: torch.Tensor, info: RopeInfo, max_positions: int, num_positions: int) -> Frequencies:
    """YaRN: as llama3, with a blend that is linear in the dimension, and a scale of cosines and sines."""
    factors = info.factors
    original = _original_length(info, max_positions)
    factor = factors.get("factor") or max_positions / original
    rotary_dim = 2 * len(plain)

    def dimension_of(turns: float) -> float:
        """The dimension with this many rotations in the original context."""
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(info.theta))

    first = dimension_of(factors.get("beta_fast") or 32)
    last = dimension_of(factors.get("beta_slow") or 1)
    if factors.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    divided = ((torch.arange(len(plain), dtype=torch.float32) - first) / max(last - first, 0.001)).clamp(0, 1)
    return divided * plain / factor + (1 - divided) * plain, _yarn_scale(factors, factor)


def _longrope(plain: torch.Tensor, info: RopeInfo, max_positions: int, num_positions: int) -> Frequencies:
    """LongRoPE: a divisor per frequency, from one set up to the original context and another set beyond it."""
    factors = info.factors
    original = _original_length(info, max_positions)
    divisors = torch.tensor(factors["long_factor" if num_positions > original else "short_factor"], dtype=torch.float32)
    if len(divisors) != len(plain):
        raise BadCheckpoint(f"rope scaling of kind longrope has {len(divisors)} factors for {len(plain)} frequencies")
    scale = factors.get("attention_factor")
    if scale is None:
        stretch = factors.get("factor") or max_positions / original
        scale = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return 1.0 / (divisors * (1.0 / plain)), float(scale)


def _original_length(info: RopeInfo, max_positions: int) -> float:
    """The context of pretraining. If the config omits it, it is `max_positions`, as in transformers."""
    original = info.factors.get("original_max_position_embeddings")
    return float(max_positions if original is None else original)


def _yarn_scale(factors: dict[str, Any], factor: float) -> float:
    given = factors.get("attention_factor")
    if given is not None:
        return float(given)

    def scale_of(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0

    strength, strength_all = factors.get("mscale"), factors.get("mscale_all_dim")
    if strength and strength_all:
        return scale_of(strength) / scale_of(strength_all)
    return scale_of(1.0)


KINDS: dict[str, Callable[[torch.Tensor, RopeInfo, int, int], Frequencies]] = {
    "default": _default,
    "none": _none,
    "dynamic": _dynamic,
    "linear": _linear,
    "proportional": _proportional,
    "ntk": _ntk,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


# QueryScaleTable: a factor of the queries by their position, looked up once per step for all layers.


class QueryScaleTable(Layer):
    def __init__(self, shape: QueryScale, num_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("table", torch.empty(num_positions, 1, 1, dtype=dtype))

    table: torch.Tensor

    def fill(self) -> None:
        """Compute the table on the host, so that all devices have the same."""
        positions = torch.arange(len(self.table), dtype=torch.float32)
        factors = 1 + self.shape.beta * torch.log(1 + torch.floor(positions / self.shape.length))
        self.table = factors.view(-1, 1, 1).to(self.table.dtype).to(self.table.device)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[T] to [T, 1, 1]."""
        return self.table.index_select(0, positions)
