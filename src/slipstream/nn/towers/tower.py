"""Tower: patches of pictures to rows of the text model's inputs, as a `TowerShape` describes.

Pictures of a call are packed without padding. All indices come from the host (`layout.py`), so nothing is read back
from the device. A picture's rows do not depend on the others of the call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from slipstream.nn.block import DecoderBlock
from slipstream.nn.context import AttentionBackend, BatchView, ForwardContext
from slipstream.nn.layers.activations import find_activation
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import new_norm
from slipstream.nn.layers.position_embedding import Table
from slipstream.nn.towers.layout import Grid, TowerLayout
from slipstream.nn.towers.shapes import AxialRope, JoinPatches, MeanPatches, PatchShape, ProjectorNorm, Step, TowerShape
from slipstream.nn.weights.stored_part import reshaped_target
from slipstream.nn.weights.weight_format import FormatOf, WeightFormat, WeightTarget


class Tower(nn.Module):
    """Built on the meta device, as `Decoder` is, of which it is a part: its weights are those of the same checkpoint,
    in the formats of `format_of("tower...")`."""

    def __init__(self, shape: TowerShape, dtype: torch.dtype, format_of: FormatOf) -> None:
        super().__init__()
        self.shape = shape
        layout = Layout(shape.hidden_size, dtype, lambda name: format_of(f"tower.{name}"))
        with torch.device("meta"):
            self.patch = PatchEmbedding(shape.patch, shape.hidden_size, format_of("tower.patch"), dtype)
            self.table: StoredTable | None = None
            if shape.table is not None:
                self.table = StoredTable(shape.table.side**2 + shape.class_token, shape.hidden_size, shape, dtype)
            self.class_token = StoredTable(1, shape.hidden_size, shape, dtype) if shape.class_token else None
            self.newline = None if shape.tiles is None else StoredTable(1, shape.output_size, shape, dtype)
            self.first_norm = None
            if shape.first_norm is not None:
                self.first_norm = new_norm(shape.hidden_size, shape.first_norm, dtype)
            self.rope = None if shape.rope is None else AxialAngles(shape.rope, dtype)
            self.layers = nn.ModuleList(
                DecoderBlock(number, shape.layer, (None,), (None,), layout) for number in range(shape.num_layers)
            )
            self.projector = Projector("projector", shape.projector, shape, layout)
            self.levels = nn.ModuleList(
                Projector(f"levels.{number}", tap.projector, shape, layout) for number, tap in enumerate(shape.taps)
            )
        self.eval()

    def fill_buffers(self) -> None:
        """To be called once the module has memory."""
        self.patch.fill_buffers()
        if self.rope is not None:
            self.rope.fill_buffers()

    def forward(
        self,
        patches: torch.Tensor,  # [N, values of a patch] uint8: those of pictures with one frame, or of videos with all
        layout: TowerLayout,
        arrays: Mapping[str, torch.Tensor],  # those of the layout
        attention: AttentionBackend,  # `choose_attention` without groups, for `head_dims` of the attention's head size
    ) -> torch.Tensor:
        """Returns [M, levels, output size], the rows of all pictures one behind the other. Level 0 takes the place of
        embeddings (`GivenEmbeddings.values`); level k is for `GivenEmbeddings.added`, behind layer k - 1 of the text
        model."""
        order = arrays.get("order")
        x = self.patch(patches if order is None else patches.index_select(0, order))
        if self.table is not None and self.table.is_resized:
            x = x.add_(self.table.resized(layout.grids, order))
        elif self.table is not None:
            for indices, weights in zip(arrays["table_rows"], arrays["table_weights"], strict=True):
                x = x.addcmul_(self.table(indices), weights.to(x.dtype).unsqueeze(1))
        if self.class_token is not None:
            token = self.class_token.weight if self.table is None else self.class_token.weight + self.table.weight[:1]
            x = torch.cat([x, token]).index_select(0, arrays["with_class"])
        if self.first_norm is not None:
            x, _ = self.first_norm(x)
        full = self._context(layout.segments, arrays["starts"], attention, x)
        if self.rope is not None:
            full = full.with_rotary((self.rope(arrays["cells"]),))
        local = full
        if len(layout.windows):
            local = self._context(layout.windows, arrays["window_starts"], attention, x)
            local = local.with_rotary(full.rotary)
        found = {}
        taps = {tap.layer: self.levels[number] for number, tap in enumerate(self.shape.taps)}
        residual = None
        for number, block in enumerate(self.layers):
            x, residual = block(x, residual, full if number in self.shape.full_layers else local)
            if number in taps:
                x, residual = x + residual, None
                found[number] = taps[number](x)
        x = x if residual is None else x + residual
        if self.class_token is not None:
            x = x.index_select(0, arrays["patches"])
        rows = torch.stack([self.projector(x), *(found[number] for number in sorted(taps))], 1)
        if self.newline is not None:
            rows = torch.cat([rows, self.newline.weight.unsqueeze(1)])
            pairs = zip(arrays["joined_rows"], arrays["joined_weights"], strict=True)
            terms = [rows.index_select(0, own) * weights.to(x.dtype)[:, None, None] for own, weights in pairs]
            rows = torch.stack(terms).sum(0)
        outputs = arrays.get("outputs")
        return rows if outputs is None else rows.index_select(0, outputs)

    @staticmethod
    def _context(
        counts: NDArray[np.int32], starts: torch.Tensor, attention: AttentionBackend, x: torch.Tensor
    ) -> ForwardContext:
        """The context of layers in which these numbers of hidden states see each other."""
        ids = x[:, 0]  # only its length is read
        batch = BatchView(
            ids=ids,
            positions=ids[:0],
            lengths=starts[1:] - starts[:-1],
            slots=(),
            page_tables=(),
            num_tokens=counts,
            max_lengths=counts,
            num_single=0,
            query_starts=starts,
        )
        return ForwardContext(batch, attention, attention.make_metadata(batch), [], ())


class PatchEmbedding(Linear):
    """Normalises a patch's values and multiplies them. The stride of the convolution is its kernel's size."""

    def __init__(self, shape: PatchShape, hidden_size: int, format: WeightFormat, dtype: torch.dtype) -> None:
        super().__init__(shape.num_values, {"": hidden_size}, shape.bias, format, dtype)
        self.patch, self.dtype = shape, dtype
        self.register_buffer("scale", torch.empty(3, dtype=torch.float32))
        self.register_buffer("shift", torch.empty(3, dtype=torch.float32))

    scale: torch.Tensor
    shift: torch.Tensor

    def fill_buffers(self) -> None:
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (self.patch.mean, self.patch.std))
        self.scale.copy_(self.patch.rescale / std)
        self.shift.copy_(-mean / std)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[N, values] uint8 to [N, hidden]."""
        shape, count = self.patch, len(patches)
        per_channel = (count, -1, 3) if shape.channels_last else (count, 3, -1)
        scale, shift = (self.scale, self.shift) if shape.channels_last else (self.scale[:, None], self.shift[:, None])
        x = torch.addcmul(shift, patches.view(per_channel), scale).to(self.dtype)
        if patches.shape[1] < shape.num_values:  # the frame of a picture is repeated
            x = x.view(count, 3, 1, -1).expand(-1, -1, shape.frames, -1)
        return super().forward(x.reshape(count, shape.num_values))

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        shape = self.patch
        stored = (3, shape.frames, shape.side, shape.side) if shape.frames > 1 else (3, shape.side, shape.side)
        for name, target in super().weight_targets():
            is_kernel = name == "weight" and not shape.is_matrix
            yield name, reshaped_target(target, (self.num_outputs, *stored)) if is_kernel else target


class StoredTable(Table):
    """A table that may have a leading dimension of 1 in the checkpoint; that of one row has no dimension of rows."""

    def __init__(self, num_rows: int, size: int, shape: TowerShape, dtype: torch.dtype) -> None:
        super().__init__(num_rows, size, dtype)
        self.stored: tuple[int, ...] = (size,) if num_rows == 1 else (num_rows, size)
        if shape.is_batched:
            self.stored = (1, num_rows, size)
        self.is_resized = shape.table is not None and shape.table.kind == "resized"

    def resized(self, grids: Sequence[Grid], order: torch.Tensor | None) -> torch.Tensor:
        """A vector for each patch of some views. Computed in float32, as in training."""
        side = math.isqrt(len(self.weight))
        table = self.weight.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        found = {
            size: F.interpolate(table, size, mode="bilinear", antialias=True).flatten(2)[0].t()
            for size in {(rows, cols) for _, rows, cols in grids}
        }
        all_of = torch.cat([found[rows, cols] for frames, rows, cols in grids for _ in range(frames)])
        return (all_of if order is None else all_of.index_select(0, order)).to(self.weight.dtype)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        for name, target in super().weight_targets():
            yield name, reshaped_target(target, self.stored)


class AxialAngles(Layer):
    """Cosines and sines for the place of each patch, computed once a call."""

    def __init__(self, shape: AxialRope, dtype: torch.dtype) -> None:
        super().__init__()
        self.frequencies, self.dtype = shape.frequencies, dtype
        self.register_buffer("axes", torch.empty(len(self.frequencies), dtype=torch.int64))
        self.register_buffer("speeds", torch.empty(len(self.frequencies), 1, dtype=torch.float32))

    axes: torch.Tensor
    speeds: torch.Tensor

    def fill_buffers(self) -> None:
        self.axes.copy_(torch.tensor([axis for axis, _ in self.frequencies]))
        self.speeds.copy_(torch.tensor([[speed] for _, speed in self.frequencies]))

    def forward(self, cells: torch.Tensor) -> torch.Tensor:
        """[2, N] to rows of a rope table, [N, 2, head dim]."""
        angles = (cells.index_select(0, self.axes) * self.speeds).t()
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1).to(self.dtype)


class Projector(Layer):
    """The steps from hidden states of patches, sorted by rows of the output, to these rows."""

    def __init__(self, name: str, steps: tuple[Step, ...], shape: TowerShape, layout: Layout) -> None:
        super().__init__()
        self.steps, self.unit = steps, shape.merge**2
        size = shape.hidden_size
        for step in steps:
            if isinstance(step, JoinPatches):
                size *= self.unit
            elif isinstance(step, MeanPatches):
                continue
            elif isinstance(step, ProjectorNorm):
                self.add_module(step.name, new_norm(size, step.norm, layout.dtype))
            else:
                format = layout.format_of(f"{name}.{step.name}")
                self.add_module(step.name, Linear(size, {"": step.size}, step.bias, format, layout.dtype))
                size = step.size
        assert size == shape.output_size, f"{name} makes rows of {size}, the text model has {shape.output_size}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, hidden] to [M, output size]."""
        for step in self.steps:
            if isinstance(step, JoinPatches):
                x = x.reshape(len(x) // self.unit, self.unit, -1)
                x = (x.transpose(1, 2) if step.by_number else x).flatten(1)
            elif isinstance(step, MeanPatches):
                x = x.view(len(x) // self.unit, self.unit, -1).mean(1)
            elif isinstance(step, ProjectorNorm):
                x = self._modules[step.name](x)[0]  # type: ignore[misc]
            else:
                activation = None if step.activation == "linear" else find_activation(step.activation)
                x = self._modules[step.name](x, None, activation)  # type: ignore[misc]
        return x
