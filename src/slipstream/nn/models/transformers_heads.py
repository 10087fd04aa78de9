"""Heads of modules of the transformers library: its own code computes logits and classes from given hidden states.

The layers of a causal LM or a classifier are replaced by `GivenStates`, which returns hidden states that were computed
before. So scales, caps, poolers and classifiers are the library's, whatever they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class GivenStates(nn.Module):
    """In place of the layers of a module. `pooler`: that of the layers, for encoders that have one."""

    def __init__(self, pooler: nn.Module | None = None) -> None:
        super().__init__()
        self.pooler = pooler
        self.hidden: torch.Tensor | None = None
        self.__dict__["decoder"] = self  # some causal LMs call this part of their layers

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        assert self.hidden is not None
        return _Outputs(self.hidden, None if self.pooler is None else self.pooler(self.hidden))


class _Outputs:
    """The result of the layers as a head reads it: hidden states, the pooler's output, None for everything else."""

    def __init__(self, hidden: torch.Tensor, pooled: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden
        self.pooler_output = pooled

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return (self.last_hidden_state, self.pooler_output)[index]

    def __getattr__(self, name: str) -> None:
        return None


def replace_layers(module: Any, base: Any, given: GivenStates) -> None:
    """`module` calls `given` from now on, and `base` is no part of it."""
    setattr(module, next(name for name, child in module.named_children() if child is base), given)


class LibraryHeads(nn.Module):
    """The classes of a module for classification of texts or tokens. Has the methods of `Heads` that its tasks use."""

    sparse_by = None

    def __init__(self, module: Any, given: GivenStates) -> None:
        super().__init__()
        self.classifier, self.given = module, given
        self.dtype = next(module.parameters()).dtype
        config = module.config.get_text_config()
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # a decoder's classifier looks for the last token before padding: texts have one

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden] to scores [N, classes]: N texts of one token each for the library."""
        self.given.hidden = pooled.to(self.dtype).unsqueeze(1)
        ids = torch.zeros(len(pooled), 1, dtype=torch.int64, device=pooled.device)
        scores: torch.Tensor = self.classifier(input_ids=ids, return_dict=True).logits
        self.given.hidden = None
        return scores.reshape(len(pooled), -1).float() if self.dtype != torch.float64 else scores.flatten(1)

    def token_classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to scores [T, classes]."""
        return self.classify(hidden)

    def embed(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled

    def token_embed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden
