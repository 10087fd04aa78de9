"""DraftHead: one layer that drafts from the hidden states of another model, the target.

The entry of position p in its cache is computed from the target's features of position p and from the token of position
p + 1; its output predicts the token of position p + 2. For further drafts its own output takes the place of the
target's features. `MtpHead` here, `EagleHead` and `Eagle3Head` in `eagle.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.nn.block import DecoderBlock
from slipstream.nn.context import ForwardContext
from slipstream.nn.decoder import Decoder, DecoderShape
from slipstream.nn.layers.attention import Attention
from slipstream.nn.layers.latent_attention import LatentAttention
from slipstream.nn.layers.layer import Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import UnweightedNorm, new_norm
from slipstream.nn.layers.rope import Rope
from slipstream.nn.weights.source import Rules
from slipstream.nn.weights.weight_format import FormatOf, take_memory

# AttachedModel: a model that drafts from the hidden states of another model, the target.
#
# Embedding and projection to tokens are the target's, unless the drafter has its own.


class AttachedModel(nn.Module):
    """Built on the meta device, as `Decoder`. `attach` gives it the target before its first step."""

    def __init__(self, shape: DecoderShape, num_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self._targets: tuple[Decoder, ...] = ()  # in a tuple, so that its weights are not part of this module
        with torch.device("meta"):
            # rope is computed for all positions of the engine, even if the drafter was trained with fewer
            self.ropes = nn.ModuleList(
                Rope(rope.info, rope.head_dim, max(shape.max_positions, num_positions), num_positions, dtype)
                for rope in shape.ropes
            )

    def attach(self, target: Decoder) -> None:
        self._targets = (target,)

    @property
    def target(self) -> Decoder:
        return self._targets[0]

    def materialize(self, device: torch.device) -> None:
        take_memory(self, device)
        for module in self.modules():
            if isinstance(module, Rope):
                module.fill()
            elif isinstance(module, UnweightedNorm):
                module.fill_buffers()

    def draft(self, hidden: torch.Tensor) -> torch.Tensor:
        """The token with the highest logit, by hidden state [n] int64."""
        return self.target.logits(hidden).argmax(1)


class DraftHead(AttachedModel):
    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Converts the target's output for each token to features [T, hidden]."""
        return hidden

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.target.embedding(ids)
        scale = self.target.embedding_scale
        return found if scale == 1.0 else found * scale

    def forward(
        self, ids: torch.Tensor, features: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states that `draft` takes, and the features of the next position. `ids` [T]: of the positions
        after those of the context. With `only_last` [B, hidden], of each row's last token."""
        rows = context.batch.positions
        context = context.with_rotary(tuple(rope(rows) for rope in self.ropes))
        return self.run(self.embed(ids), features, context)

    def store(self, ids: torch.Tensor, features: torch.Tensor, context: ForwardContext) -> None:
        """As `forward`, but only stores the entries of the cache. They depend on the inputs of the one layer, so its
        attention and its feed-forward are not computed."""
        context = context.with_rotary(tuple(rope(context.batch.positions) for rope in self.ropes))
        self.store_inputs(self.embed(ids), features, context)

    @abstractmethod
    def store_inputs(self, embeds: torch.Tensor, features: torch.Tensor, context: ForwardContext) -> None:
        """As `store`, from embeddings."""

    @abstractmethod
    def run(
        self, embeds: torch.Tensor, features: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, from embeddings."""


class MtpHead(DraftHead):
    """Multi-token prediction as DeepSeek-V3 and Qwen3-Next do it: norms of both inputs, a projection of both side by
    side, and a layer of the target's kind."""

    def __init__(
        self, shape: DecoderShape, num_positions: int, dtype: torch.dtype, format_of: FormatOf, *, feeds_normed: bool
    ) -> None:
        """`feeds_normed`: the next features are the output after its norm, not before."""
        super().__init__(shape, num_positions, dtype)
        self.feeds_normed = feeds_normed
        size, layout = shape.hidden_size, Layout(shape.hidden_size, dtype, format_of)
        with torch.device("meta"):
            self.norm = new_norm(size, shape.norm, dtype)
            self.embed_norm = new_norm(size, shape.norm, dtype)
            self.hidden_norm = new_norm(size, shape.norm, dtype)
            self.projection = Linear(2 * size, {"": size}, False, format_of("projection"), dtype)
            self.layers = nn.ModuleList([DecoderBlock(0, shape.layers[0], shape.sites[0], (None,), layout)])

    def store_inputs(self, embeds: torch.Tensor, features: torch.Tensor, context: ForwardContext) -> None:
        block = self.layers[0]
        assert isinstance(block, DecoderBlock)
        attention = getattr(block, block.shape.mixers[0].name)
        assert isinstance(attention, Attention | LatentAttention), "an MTP layer has attention"
        attention.store(block.sublayers[0].norm(self._inputs(embeds, features, context))[0], context)

    def _inputs(self, embeds: torch.Tensor, features: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        both = torch.cat([self.embed_norm(embeds)[0], self.hidden_norm(features)[0]], 1)
        projected: torch.Tensor = self.projection(both, context)
        return projected

    def run(
        self, embeds: torch.Tensor, features: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        last = context.last_tokens() if context.only_last else None
        x, residual = self.layers[0](self._inputs(embeds, features, context), None, context, last)
        normed, total = self.norm(x, residual)
        return normed, normed if self.feeds_normed else total


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """The names of the MTP layer in checkpoints of a family."""

    count: str  # the field of config.json with the number of MTP layers
    root: Callable[[int], str]  # how tensor names begin, by the number of the target's layers
    layer: str  # and those of the layer, after the root
    names: dict[str, str | None]  # after the root: tensor names, to ours
    feeds_normed: bool


class HeadRules(Rules):
    """Rules for the tensors under a root, of which the layer's are named as those of a layer of the target."""

    def __init__(self, root: str, layer: str, own: dict[str, str | None], of_layer: Rules) -> None:
        super().__init__(own)
        self._root, self._layer, self._of_layer = root, layer, of_layer

    def rename(self, name: str) -> str | None:
        if not name.startswith(self._root):
            return None
        inside = name.removeprefix(self._root)
        try:
            return super().rename(inside)
        except KeyError:
            if not inside.startswith(self._layer):
                raise
            return self._of_layer.rename(f"model.layers.0.{inside.removeprefix(self._layer)}")


_DEEPSEEK = MtpFamily(
    count="num_nextn_predict_layers",
    root=lambda num_layers: f"model.layers.{num_layers}.",
    layer="",
    names={
        "enorm.weight": "embed_norm.weight",
        "hnorm.weight": "hidden_norm.weight",
        "eh_proj.{kind}": "projection.{kind}",
        "shared_head.norm.weight": "norm.weight",
        # copies of the target's
        "shared_head.head.{kind}": None,
        "embed_tokens.{kind}": None,
    },
    feeds_normed=False,
)
_QWEN = MtpFamily(
    count="mtp_num_hidden_layers",
    root=lambda num_layers: "mtp.",
    layer="layers.0.",
    names={
        "pre_fc_norm_embedding.weight": "embed_norm.weight",
        "pre_fc_norm_hidden.weight": "hidden_norm.weight",
        "fc.{kind}": "projection.{kind}",
        "norm.weight": "norm.weight",
    },
    feeds_normed=True,
)
MTP = {
    "DeepseekV3": _DEEPSEEK,
    "Glm4Moe": _DEEPSEEK,
    "Qwen3Next": _QWEN,
    "Qwen3_5": _QWEN,
    "Qwen3_5Text": _QWEN,
    "Qwen3_5Moe": _QWEN,
    "Qwen3_5MoeText": _QWEN,
}
"""By the names of families in `registry.py`."""
