"""ImageRows: encodes the images of a step, and gives its tokens of images their rows and positions.

The arena holds what the tower made of images, in slots that the scheduler assigns. A step that encodes or reads images
runs eagerly, since their sizes differ between steps. Of the tokens behind all images of its prompt, a row needs only
the difference between position and index, so steps without image tokens are captured as others are; while no running
row has images, they are the same steps as of an engine without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from slipstream.config.config import ImageConfig
from slipstream.contracts.step import ImagePlan, StepPlan
from slipstream.device.device import Device
from slipstream.nn.context import AttentionBackend, ForwardContext, GivenEmbeddings
from slipstream.nn.towers.layout import ImageViews, lay_out
from slipstream.nn.towers.tower import Tower
from slipstream.runner.features import ForwardPart, Gathered, Size, StepFeature
from slipstream.runner.staging import StagedTensor, Upload


class ImageRows(StepFeature):
    def __init__(
        self,
        config: ImageConfig,
        tower: Tower,
        attention: AttentionBackend,
        num_rows: int,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        """`attention`: of the tower. `num_rows`: of requests."""
        shape = tower.shape
        assert shape.num_levels * shape.output_size == config.row_size, "the memory estimate has another size of rows"
        self._tower = tower
        self._attention = attention
        self._has_parts = config.has_parts
        self._arena = device.zeros((config.num_slots * config.slot_rows, shape.num_levels, shape.output_size), dtype)
        self._shifts = StagedTensor((num_rows,), np.int64, device)
        self._shift_of: dict[int, int] = {}  # by row, as on the device; rows that are missing have 0

    def captures(self, plan: StepPlan) -> bool:
        return plan.images is None

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released.tolist():
            if self._shift_of.pop(row, 0):
                self._shifts.write(row, 0)
        for admission in plan.admitted:
            if admission.position_shift:
                self._shift_of[admission.row] = admission.position_shift
                self._shifts.write(admission.row, admission.position_shift)

    def flush(self, upload: Upload) -> None:
        self._shifts.flush(upload)

    def join_forward(self, plan: StepPlan, upload: Upload, size: Size | None) -> ForwardPart | None:
        if plan.images is None:
            shifts = self._shift_of or any(each.position_shift for each in plan.admitted)
            return ForwardPart("shifted", self._shift) if shifts else None
        works = [self._encode(plan.images, upload)] if plan.images.encodings else []
        if len(plan.images.indices):
            works.append(self._give(plan.images, upload))
        if self._has_parts:
            works.append(self._set_positions(plan.images, upload))

        def add(batch: Gathered, context: ForwardContext) -> ForwardContext:
            for work in works:
                context = work(batch, context)
            return context

        return ForwardPart(add=add)

    def _encode(self, images: ImagePlan, upload: Upload) -> Callable[[Gathered, ForwardContext], ForwardContext]:
        """Host: upload the patches. The returned work writes the rows of the images to the arena."""
        layout = lay_out(self._tower.shape, [ImageViews(each.grids) for each in images.encodings])
        assert layout.num_rows == tuple(len(each.rows) for each in images.encodings), "images of other sizes"
        num_values = images.encodings[0].patches.shape[1]
        patches, target = upload.room(np.uint8, (layout.num_patches, num_values))
        np.concatenate([each.patches for each in images.encodings], out=target)
        arrays = {name: upload.put(array) for name, array in layout.arrays.items()}
        rows = upload.put(np.concatenate([each.rows for each in images.encodings]).astype(np.int64))

        def encode(batch: Gathered, context: ForwardContext) -> ForwardContext:
            own = {name: upload.tensor(span) for name, span in arrays.items()}
            made = self._tower(upload.tensor(patches), layout, own, self._attention)
            self._arena.index_copy_(0, upload.tensor(rows), made)
            return context

        return encode

    def _give(self, images: ImagePlan, upload: Upload) -> Callable[[Gathered, ForwardContext], ForwardContext]:
        """Host: upload which tokens are of images. The returned work reads their rows from the arena."""
        indices, rows = (upload.put(array.astype(np.int64)) for array in (images.indices, images.rows))

        def give(batch: Gathered, context: ForwardContext) -> ForwardContext:
            found = self._arena.index_select(0, upload.tensor(rows))
            added = found[:, 1:] if found.shape[1] > 1 else None
            given = GivenEmbeddings(upload.tensor(indices), found[:, 0], added)
            return replace(context, batch=replace(context.batch, embeds=given))

        return give

    def _set_positions(self, images: ImagePlan, upload: Upload) -> Callable[[Gathered, ForwardContext], ForwardContext]:
        """Host: upload positions of three parts. The returned work gives them to the step's tokens."""
        placed, positions = (upload.put(array.astype(np.int64)) for array in (images.placed, images.positions))

        def set_positions(batch: Gathered, context: ForwardContext) -> ForwardContext:
            context = self._shift(batch, context)
            assert context.batch.rope_rows is not None
            three = context.batch.rope_rows.repeat(3, 1)
            three.index_copy_(1, upload.tensor(placed), upload.tensor(positions))
            return replace(context, batch=replace(context.batch, rope_rows=three))

        return set_positions

    def _shift(self, batch: Gathered, context: ForwardContext) -> ForwardContext:
        """Device: each token's index and the shift of its row."""
        assert batch.token_rows is not None, "rows of a model with images last for several steps"
        shifted = context.batch.positions + self._shifts.device.index_select(0, batch.token_rows)
        return replace(context, batch=replace(context.batch, rope_rows=shifted))
