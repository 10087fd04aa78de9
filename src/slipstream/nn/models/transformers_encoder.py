"""TransformersEncoder: an encoder of the transformers library with our batching, attention and pooling.

It serves architectures without a family of our own. A step has whole texts as one row of the library's module, without
padding; positions are given, and attention finds the texts in the step's context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.context import ForwardContext
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.transformers_heads import GivenStates, LibraryHeads, replace_layers
from slipstream.nn.models.transformers_probe import (
    base_of,
    handle_attention,
    hidden_of,
    is_classifier,
    position_offset,
    probe,
)


class TransformersEncoder(nn.Module):
    def __init__(self, info: ModelInfo, shape: DecoderShape, module: Any) -> None:
        super().__init__()
        self.shape = shape
        self.heads: LibraryHeads | None = None
        self.layers = nn.ModuleList()  # none that a start could run alone
        self.base = base_of(module)
        self.scales = [call.scale for call in probe(info.backend_folder).calls]
        self.position_offset = position_offset(self.base)
        self.has_types = info.num_types > 0
        handle_attention(self.base, self._attend)
        if is_classifier(info.architecture):
            given = GivenStates(getattr(self.base, "pooler", None))
            replace_layers(module, self.base, given)
            self.heads = LibraryHeads(module, given)
        self._context: ForwardContext | None = None
        self._site = 0

    def forward(self, context: ForwardContext) -> torch.Tensor:
        batch = context.batch
        self._context, self._site = context, 0
        inputs = {"input_ids": batch.ids.unsqueeze(0)}
        if self.has_types:
            types = torch.zeros_like(batch.ids) if batch.token_types is None else batch.token_types
            inputs["token_type_ids"] = types.unsqueeze(0)
        try:
            return hidden_of(self.base, (batch.positions + self.position_offset).unsqueeze(0), **inputs)[0]
        finally:
            self._context = None

    def _attend(
        self,
        layer: Any,
        query: torch.Tensor,  # [1, heads, T, head dim]
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[1, T, heads, head dim]"""
        context, site = self._context, self._site
        assert context is not None, "attention outside of a step"
        self._site += 1
        query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        return context.attention.bidirectional(query, key, value, self.scales[site], context).unsqueeze(0)

    def use_layers(self, layers: nn.ModuleList) -> None:
        """The module runs as a whole."""
