"""Classes of torch.nn that a folder may name as an activation.

No other name is looked up. Each can be constructed without arguments and processes every vector separately.
"""

from __future__ import annotations

ELEMENTWISE = frozenset((
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid",
    "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh",
    "Tanhshrink",
))  # fmt: skip
OVER_LAST_DIM = frozenset(("LogSoftmax", "Softmax", "Softmin"))
"""These normalise over the elements of a vector. For token vectors torch would use the batch: not supported."""
HALVING = "GLU"
"""This halves the size of a vector."""


def torch_class(name: object) -> str | None:
    """The name of the class, if the full name is one of torch.nn and on the list."""
    text = str(name)
    kind = text.rsplit(".", 1)[-1]
    known = kind in ELEMENTWISE or kind in OVER_LAST_DIM or kind == HALVING
    return kind if text.startswith("torch.nn.") and known else None
