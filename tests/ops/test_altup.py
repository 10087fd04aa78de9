"""Copies of a token: predicted from each other and corrected, by reference and kernels, against plain loops."""

from __future__ import annotations

import os

import pytest
import torch

from slipstream.ops.gemm.altup import reference

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def version(name):
    if name == "reference":
        return reference
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    import slipstream.ops.gemm.altup.triton

    return slipstream.ops.gemm.altup.triton


def make(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("name", ["reference", "kernel"])
@pytest.mark.parametrize(("tokens", "num", "hidden"), [(3, 4, 33), (1, 3, 600), (0, 2, 16)])
def test_predictions_are_the_definition(name, tokens, num, hidden):
    copies, weights = make(tokens, num, hidden), make(tokens, num * num)
    expected = copies.double().clone()
    for copy in range(num):
        for other in range(num):
            weight = weights[:, copy * num + other].double().unsqueeze(1)
            expected[:, copy] += weight * copies[:, other].double()
    found = version(name).predict_copies(copies, weights)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "kernel"])
@pytest.mark.parametrize("active", [0, 2])
def test_corrections_are_the_definition(name, active):
    predicted, made, weights = make(5, 3, 70), make(5, 70), make(5, 3)
    error = made.double() - predicted[:, active].double()
    expected = torch.stack(
        [predicted[:, n].double() + (1 + weights[:, n : n + 1].double()) * error for n in range(3)], 1
    )
    found = version(name).correct_copies(predicted, made, weights, active)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "kernel"])
@pytest.mark.parametrize(("tokens", "num", "hidden", "outputs"), [(3, 4, 33, 16), (5, 3, 600, 3), (0, 2, 16, 2)])
def test_routed_weights_are_the_definition(name, tokens, num, hidden, outputs):
    x, norm = make(tokens, num, hidden)[:, 1], make(hidden)
    router, coefficients = make(num, hidden), make(outputs, num)
    wide = x.double()
    normed = wide / (wide.square().mean(1, keepdim=True) + 1e-3).sqrt() * norm.double() * 0.2
    expected = torch.tanh(normed @ router.double().T) @ coefficients.double().T
    found = version(name).route_copies(x, norm, 1e-3, 0.2, router, coefficients)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
