"""TowerShape: the sizes and options by which one tower differs from another, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.checkpoint.model_info import ModelSizes
from slipstream.nn.shapes import AttentionShape, LayerShape, MlpShape, NormShape, sizes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchShape:
    """The product from a patch's values to its first hidden state, whose input is (value * rescale - mean) / std."""

    side: int
    frames: int  # a patch of a picture has one, which is repeated
    channels_last: bool  # order of values: (y, x, channel); else (channel, frame, y, x)
    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    bias: bool
    is_matrix: bool = False  # how the checkpoint stores the weight: as a matrix, or as that of a convolution

    @property
    def num_values(self) -> int:
        """Of a patch with all of its frames."""
        return 3 * self.frames * self.side**2


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionTable:
    """A vector for each place of a square, which is added to the patches."""

    side: int
    # fixed: the patches are those of the square; aligned: vectors between its places are interpolated, and the corners
    # of table and picture coincide; resized: it is resized as a picture is, with antialiasing
    kind: Literal["fixed", "aligned", "resized"] = "fixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxialRope:
    """The first half of a head's frequencies turn by a patch's row, the second half by its column."""

    head_dim: int
    theta: float = 10_000.0
    in_turn: bool = False  # of successive frequencies, one is of a row and one of a column; else both have the same

    @property
    def frequencies(self) -> tuple[tuple[int, float], ...]:
        """Axis (0: row, 1: column) and radians per place of each of the head_dim / 2 pairs of values."""
        steps = [(axis, 4 * index + 2 * axis * self.in_turn) for axis in (0, 1) for index in range(self.head_dim // 4)]
        return tuple((axis, 1.0 / self.theta ** (step / self.head_dim)) for axis, step in steps)


# Steps of a projector: from the hidden states of patches to rows of the text model.


@dataclass(frozen=True, slots=True)
class JoinPatches:
    """The hidden states of the patches of one token become one: side by side, row by row."""

    by_number: bool = False  # the first numbers of all of them, then the second numbers


@dataclass(frozen=True, slots=True)
class MeanPatches:
    """The mean of the hidden states of the patches of one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorNorm:
    norm: NormShape
    name: str = "norm"  # of its module


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorProduct:
    size: int  # of its output
    name: str
    bias: bool = True
    activation: str = "linear"


Step = JoinPatches | MeanPatches | ProjectorNorm | ProjectorProduct


@dataclass(frozen=True, slots=True)
class Tap:
    """Hidden states behind a layer become further features of an image (deepstack)."""

    layer: int
    projector: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class JoinedTiles:
    """The first view is the whole picture. The rows of its tiles become one grid without the padding of the picture,
    shrunk if it is large, and a learned row ends each line (LLaVA-OneVision)."""

    most: int  # tiles whose rows are not shrunk


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    hidden_size: int
    output_size: int  # of a row, the hidden size of the text model
    patch: PatchShape
    merge: int  # patches to each side that become one row
    in_blocks: bool  # the order in which patches come: those of one row together; else row by row
    attention: AttentionShape
    feed: MlpShape
    norm: NormShape
    num_layers: int
    projector: tuple[Step, ...]
    learned_scale: bool = False  # of what attention and feed add
    class_token: bool = False  # before the patches of each view; its position is the first row of the table
    is_batched: bool = False  # the checkpoint's class token and table have a leading dimension of 1
    first_norm: NormShape | None = None  # of the input of the first layer
    table: PositionTable | None = None
    rope: AxialRope | None = None
    window: int = 0  # side, in rows of the output, of the square that a layer sees; 0: all layers see all
    full_layers: tuple[int, ...] = ()  # with a window: the layers that see all
    taps: tuple[Tap, ...] = ()
    tiles: JoinedTiles | None = None
    transposed: tuple[str, ...] = ()  # endings of names of weights that the checkpoint stores as [inputs, outputs]

    @property
    def num_levels(self) -> int:
        """Vectors of a row: one in the place of an embedding, the others for the first layers of the text model."""
        return 1 + len(self.taps)

    @property
    def layer(self) -> LayerShape:
        return LayerShape(mixers=(self.attention,), feed=self.feed, norm=self.norm, learned_scale=self.learned_scale)

    def sizes(self, on_cpu: bool) -> ModelSizes:
        """Counts per patch beside its hidden states, as of a text model per token."""
        return sizes_of((self.layer,), self.hidden_size, on_cpu)
