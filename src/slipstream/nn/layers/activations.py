"""Activations by the names that checkpoints give them: elementwise, of gates and ups, and torch's own classes.

Elementwise ones are torch's functions, which run on every device, except relu2, which has a kernel. Gates have
kernels for the usual ones (`ops/elementwise/`); any other is the function of the gate times up, in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.sentence_modules import HALVING, OVER_LAST_DIM
from slipstream.device.sync_check import sync_allowed
from slipstream.nn.layers.layer import Layer
from slipstream.nn.weights.weight_format import CheckpointTensor, WeightTarget, new_parameter
from slipstream.ops.elementwise import (
    gelu_and_mul,
    gelu_tanh_and_mul,
    quick_gelu_and_mul,
    relu2,
    relu_and_mul,
    silu_and_mul,
    sparse_gelu_tanh_and_mul,
)

Activation = Callable[[torch.Tensor], torch.Tensor]


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_10(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x).clamp_(-10, 10)


def _laplace(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * 2.0**0.5)))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


_GELU_TANH = partial(F.gelu, approximate="tanh")
PLAIN: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_10": _gelu_10,
    # one formula, written in several ways
    "gelu_pytorch_tanh": _GELU_TANH,
    "gelu_python_tanh": _GELU_TANH,
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_accurate": _GELU_TANH,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": relu2,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "swish": F.silu,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "laplace": _laplace,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt_(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "linear": _same,
    "identity": _same,
}
"""By transformers' names: of feed-forwards without a gate, and of heads."""
_GATED: dict[str, Activation] = {
    "silu": silu_and_mul,
    "swish": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_python": gelu_and_mul,
    **dict.fromkeys((name for name, plain in PLAIN.items() if plain is _GELU_TANH), gelu_tanh_and_mul),
    "quick_gelu": quick_gelu_and_mul,
    "relu": relu_and_mul,
}


def find_activation(name: str) -> Activation:
    """The elementwise activation of this name. Raises UnsupportedModel."""
    if name not in PLAIN:
        raise UnsupportedModel(f"the activation {name} is not supported; the supported ones are {', '.join(PLAIN)}")
    return PLAIN[name]


def find_gated(name: str) -> Activation:
    """A function of [..., gate and up side by side]: activation(gate) * up. Raises UnsupportedModel."""
    return _GATED.get(name) or partial(_gate_by, find_activation(name))


def _gate_by(activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return activation(gate) * up


def scaled_gated(name: str, scale: float) -> Activation:
    """As `find_gated`, of gates that are multiplied by a number first."""
    return partial(_gate_scaled, find_activation(name), scale)


def _gate_scaled(activation: Activation, scale: float, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return activation(gate * scale) * up


def sparse_gated(name: str, sparsity: float, dtype: torch.dtype) -> Activation:
    """As `find_gated`, of gates from which a cutoff was subtracted and negative ones removed. If a token's gates were
    spread normally, a share `sparsity` of them would be removed."""
    deviations = sparse_deviations(sparsity, dtype)
    activation = find_activation(name)
    if activation is _GELU_TANH:
        return partial(_gelu_sparsely, deviations)
    return partial(_gate_sparsely, activation, deviations)


def sparse_deviations(sparsity: float, dtype: torch.dtype) -> float:
    """Standard deviations above the mean below which a share `sparsity` of normally spread numbers lies."""
    # models are laid out on the meta device
    with torch.device("cpu"), sync_allowed("a number of the model's shape, on the host, before weights are loaded"):
        return float((torch.erfinv(2 * torch.tensor(sparsity, dtype=torch.float32) - 1) * math.sqrt(2)).to(dtype))


def _gelu_sparsely(deviations: float, gate_up: torch.Tensor) -> torch.Tensor:
    return sparse_gelu_tanh_and_mul(gate_up, deviations)


def _gate_sparsely(activation: Activation, deviations: float, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    cutoff = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * deviations
    return activation(F.relu(gate - cutoff)) * up


def torch_activation(name: str) -> Activation:
    """One of torch.nn's classes as it is without arguments. `checkpoint/sentence_modules.py` has the list of those that
    sentence-transformers' modules may name."""
    if name == "PReLU":
        return partial(F.leaky_relu, negative_slope=0.25)  # the initial value of its weight
    kind: type[nn.Module] = getattr(nn, name)
    return (kind(dim=-1) if name in OVER_LAST_DIM or name == HALVING else kind()).eval()


# Xielu: an activation with two learned numbers, of Apertus.

_BETA = 0.5
_EPS = -1e-6  # inputs of the exponential are at most this


class Xielu(Layer):
    """a x^2 + x / 2 for positive x, b (exp(x) - 1 - x) + x / 2 for the others; a and b are positive."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.positive = new_parameter(1, dtype=dtype)
        self.negative = new_parameter(1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        above = F.softplus(self.positive) * x * x
        below = (torch.expm1(x.clamp(max=_EPS)) - x) * (_BETA + F.softplus(self.negative))
        return torch.where(x > 0, above, below) + _BETA * x

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "alpha_p", WeightTarget((1,), partial(self._fill, "positive"))
        yield "alpha_n", WeightTarget((1,), partial(self._fill, "negative"))

    def _fill(self, name: str, piece: CheckpointTensor) -> None:
        piece.write_to(getattr(self, name))
