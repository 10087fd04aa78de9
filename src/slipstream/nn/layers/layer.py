"""Layer: a module without torch's hooks; and Layout: what all layers of a model are built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.nn.weight_format import FormatOf


class Layer(nn.Module):
    """`nn.Module` checks for hooks at each call, which takes a twentieth of a decode step of a small model."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


@dataclass(frozen=True, slots=True)
class Layout:
    hidden_size: int
    dtype: torch.dtype
    format_of: FormatOf
