"""Classes of torch.nn that a folder may name as an activation.

No other name is looked up. Each can be made without arguments and treats every line by itself.
"""

from __future__ import annotations

ELEMENTWISE = frozenset((
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid",
    "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh",
    "Tanhshrink",
))  # fmt: skip
OF_LINES = frozenset(("LogSoftmax", "Softmax", "Softmin"))
"""Over the numbers of a line. Of token vectors torch would take them over the batch, so there they mean nothing."""
HALVING = "GLU"
"""A line of half the size."""


def torch_class(name: object) -> str | None:
    """The class's own name, if the full one is of torch.nn and on the list."""
    text = str(name)
    kind = text.rsplit(".", 1)[-1]
    known = kind in ELEMENTWISE or kind in OF_LINES or kind == HALVING
    return kind if text.startswith("torch.nn.") and known else None
