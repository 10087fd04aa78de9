"""Layer: a module that is called as plainly as a function."""

from __future__ import annotations

from typing import Any

from torch import nn


class Layer(nn.Module):
    """Without hooks, for which `nn.Module` looks at each call: a twentieth of a decode step of a small model."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)
