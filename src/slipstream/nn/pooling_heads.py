"""Heads: what a checkpoint has behind its hidden states to make vectors, scores of classes and weights of words.

Only what the checkpoint carries is built. Cutting, norming and activations that a request may choose are not here but
in the runner's pooling. Small products are made in float32 at least, those as wide as the vocabulary in the model's
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.checkpoint.pooling_info import DenseInfo, LayerNormInfo, ModuleInfo, PoolingInfo
from slipstream.config.buffer_size import VOCABULARY_CHUNK
from slipstream.nn.layers.activations import find_activation, torch_activation
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import LayerNorm
from slipstream.nn.weights.weight_format import CheckpointTensor, Unquantized, WeightTarget, new_parameter
from slipstream.ops.elementwise import segment_add_into, segment_max_into


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The layers behind the hidden states in checkpoints of a family, with its own text classifier."""

    classifier_bias: bool | None = None  # None: no classifier
    transform: str = ""  # activation of a layer before the classifier, or before the vocabulary; "": there is none
    transform_bias: bool = True
    norm_eps: float | None = None  # of a norm behind the activation; None: there is none
    norm_bias: bool = True
    vocabulary: bool = False  # a masked language model's: back to tokens
    token_bias: bool | None = None  # of a projection of each token inside the checkpoint; None: it has none
    weights_words: bool = False  # a number for each token, in a file of its own


class Heads(nn.Module):
    """The heads of the tasks: `embed`, `classify`, `token_embed`, `token_classify`, `sparse`."""

    def __init__(
        self,
        shape: HeadShape,
        pooling: PoolingInfo,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        lm_rows: Callable[[torch.Tensor], torch.Tensor],
        lm_logits: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        """`lm_rows` looks up rows of the model's projection to tokens, `lm_logits` multiplies with all of it."""
        super().__init__()
        self.pooling = pooling
        self.vocab_size = vocab_size
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.model_dtype = dtype
        self._lm_rows, self._lm_logits = lm_rows, lm_logits
        with torch.device("meta"):
            self.transform: Transform | None = None
            if shape.transform:
                wide = dtype if shape.vocabulary else self.dtype
                self.transform = Transform(hidden_size, shape, wide)
            self.classifier: Linear | None = None
            if shape.classifier_bias is not None:
                self.classifier = self._linear(hidden_size, pooling.num_labels, shape.classifier_bias)
            self.vocabulary_bias: Bias | None = Bias(vocab_size, self.dtype) if shape.vocabulary else None
            self.token: Linear | None = None
            if shape.token_bias is not None:
                self.token = self._linear(hidden_size, pooling.token_size, shape.token_bias)
            self.word: Linear | None = self._linear(hidden_size, 1, True) if shape.weights_words else None
            self.modules_behind = nn.ModuleList(vector_module(info, self.dtype) for info in pooling.modules)
            if pooling.yes_no is not None:
                self.register_buffer("yes_no", torch.empty(2, dtype=torch.int64))
        of_tokens = [isinstance(info, DenseInfo) and info.per_token for info in pooling.modules]
        self._for_vectors = [m for m, own in zip(self.modules_behind, of_tokens, strict=True) if not own]
        self._for_tokens = [m for m, own in zip(self.modules_behind, of_tokens, strict=True) if own]

    yes_no: torch.Tensor

    def _linear(self, num_inputs: int, num_outputs: int, bias: bool) -> Linear:
        return Linear(num_inputs, {"": num_outputs}, bias, Unquantized(self.dtype), self.dtype)

    def fill_buffers(self) -> None:
        """Once there is memory: what comes from no checkpoint."""
        if self.pooling.yes_no is not None:
            self.yes_no = torch.tensor(self.pooling.yes_no).to(self.yes_no.device)

    @property
    def sparse_by(self) -> Literal["token", "vocabulary"] | None:
        """The items that get weights in `sparse`: each token of the text, each word of the vocabulary, or none."""
        if self.word is not None:
            return "token"
        return "vocabulary" if self.vocabulary_bias is not None else None

    def embed(self, pooled: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [N, hidden] to vectors [N, size], through the modules behind the pooling."""
        pooled = pooled.to(self.dtype)
        for module in self._for_vectors:
            pooled = module(pooled)
        return pooled

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """[N, hidden] to scores [N, classes]. From a language model, one class: how much likelier yes is than no."""
        if self.pooling.scores_by_modules:
            return self.embed(pooled)
        pooled = pooled.to(self.dtype)
        if self.pooling.yes_no is not None:
            yes, no = self._lm_rows(self.yes_no).to(self.dtype).unbind(0)
            return pooled @ (yes - no).unsqueeze(1)
        if self.transform is not None:
            pooled = self.transform(pooled)
        assert self.classifier is not None, "the checkpoint has no classifier"
        scores: torch.Tensor = self.classifier(pooled)
        return scores

    def token_embed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden] to a vector for each token [T, size]."""
        hidden = hidden.to(self.dtype)
        for module in self._for_tokens:
            hidden = module(hidden)
        return hidden if self.token is None else self.token(hidden)

    def token_classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to scores [T, classes]."""
        return self.classify(hidden)

    def sparse(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Weights of words from hidden states [T, hidden] of rows that begin at `starts` [N + 1].

        Where `sparse_by` is "token", [T, 1]: of each token; a word's is the largest of its tokens'. Where it is
        "vocabulary", [N, vocabulary]. Weights are 0 or more.
        """
        if self.word is not None:
            weights: torch.Tensor = self.word(hidden.to(self.dtype))
            return weights.relu_()
        assert self.transform is not None and self.vocabulary_bias is not None, "the checkpoint gives words no weights"
        assert self._lm_logits is not None
        hidden = self.transform(hidden.to(self.model_dtype))
        initial = 0.0 if self.pooling.sparse_sums else -torch.inf
        # one extra row for padding tokens
        out = torch.full((len(starts), self.vocab_size), initial, dtype=self.dtype, device=hidden.device)
        for first in range(0, len(hidden), VOCABULARY_CHUNK):
            logits = self._lm_logits(hidden[first : first + VOCABULARY_CHUNK])
            if self.pooling.sparse_sums:
                segment_add_into(out, self._word_weights(logits.to(self.dtype)), starts, first)
            else:
                segment_max_into(out, logits, starts, first)
        # neither the bias nor what follows changes which token has the largest
        return out[:-1] if self.pooling.sparse_sums else self._word_weights(out[:-1])

    def _word_weights(self, logits: torch.Tensor) -> torch.Tensor:
        """In place."""
        assert self.vocabulary_bias is not None
        logits.add_(self.vocabulary_bias.data).relu_()
        for _ in range(self.pooling.sparse_logs):
            logits.log1p_()
        return logits


class Transform(Layer):
    """A product, an activation and perhaps a norm."""

    def __init__(self, size: int, shape: HeadShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = find_activation(shape.transform)
        self.dense = Linear(size, {"": size}, shape.transform_bias, Unquantized(dtype), dtype)
        self.norm: LayerNorm | None = None
        if shape.norm_eps is not None:
            self.norm = LayerNorm(size, shape.norm_eps, dtype, shape.norm_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.dense(x))
        return x if self.norm is None else self.norm(x)


class Bias(Layer):
    """A number for each word of the vocabulary."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.data = new_parameter(size, dtype=dtype)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "bias", WeightTarget(tuple(self.data.shape), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        self.data.copy_(piece.read())


# Modules behind the pooling: projections and norms of vectors, as sentence-transformers' folders have them.

LAYER_NORM_EPS = 1e-5  # torch's default, which the module's config does not say


def vector_module(info: ModuleInfo, dtype: torch.dtype) -> nn.Module:
    if isinstance(info, DenseInfo):
        return Dense(info, dtype)
    return LayerNorm(info.size, LAYER_NORM_EPS, dtype) if isinstance(info, LayerNormInfo) else UnitNorm()


def module_names(info: ModuleInfo) -> dict[str, str]:
    """The tensors of a module's file, and the parameters that they fill."""
    if isinstance(info, LayerNormInfo):
        return {"norm.{kind}": "{kind}"}
    slope = {"activation_function.weight": "slope.weight"}
    return {"linear.{kind}": "linear.{kind}", "residual.{kind}": "residual.{kind}", **slope}


class Dense(Layer):
    """A product, an activation and perhaps the input added to it."""

    def __init__(self, info: DenseInfo, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = Linear(info.in_features, {"": info.out_features}, info.bias, Unquantized(dtype), dtype)
        self.slope: Slope | None = Slope(dtype) if info.activation == "PReLU" else None
        self.activation = torch_activation(info.activation)
        self.residual: Linear | None = None
        self.adds_input = info.residual
        if self.adds_input and info.in_features != info.out_features:
            self.residual = Linear(info.in_features, {"": info.out_features}, False, Unquantized(dtype), dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        made = self.activation(made) if self.slope is None else self.slope(made)
        if self.adds_input:
            made = made + (x if self.residual is None else self.residual(x))
        out: torch.Tensor = made
        return out


class Slope(Layer):
    """PReLU: values below zero are multiplied by a learned slope."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = new_parameter(1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.prelu(x, self.weight)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget((1,), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        self.weight.copy_(piece.read())


class UnitNorm(Layer):
    """Vectors of length 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1)
