"""Gated norms, by the reference and the kernel, against transformers."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from slipstream.ops.elementwise import reference

CUDA = torch.cuda.is_available()
# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
VERSIONS = pytest.mark.parametrize("version", ["reference", "kernel"])


def ops(version: str) -> Any:
    if version == "reference":
        return reference
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    return importlib.import_module("slipstream.ops.elementwise.norm_triton")


def inputs(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and a gate that is a part of a wider tensor, as projections are."""
    torch.manual_seed(0)
    device = "cuda" if CUDA else "cpu"
    return torch.randn(*shape, device=device), torch.randn(shape[0], 2, *shape[1:], device=device)[:, 1]


@VERSIONS
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_norm_in_groups(version: str, norm_first: bool, num_groups: int) -> None:
    x, gate = inputs(7, 24)
    norm = FalconH1RMSNormGated(24, 0.1, num_groups, norm_first).to(x.device)
    norm.weight.data.normal_()
    out = ops(version).gated_group_norm(x, gate, norm.weight.detach(), 0.1, num_groups, norm_first)
    torch.testing.assert_close(out, norm(x[None], gate[None])[0].detach(), rtol=1e-5, atol=1e-5)


@VERSIONS
@pytest.mark.parametrize("size", [24, 2048])
def test_without_a_weight_there_is_only_the_gate(version: str, size: int) -> None:
    x, gate = inputs(3, size)
    out = ops(version).gated_group_norm(x, gate, None, 0.1, 3)
    torch.testing.assert_close(out, x * F.silu(gate), rtol=1e-5, atol=1e-5)


@VERSIONS
def test_norm_of_heads(version: str) -> None:
    x, gate = inputs(7, 3, 20)
    norm = Qwen3NextRMSNormGated(20, eps=0.1).to(x.device)
    norm.weight.data.normal_()
    out = ops(version).gated_rms_norm(x, gate, norm.weight.detach(), 0.1)
    torch.testing.assert_close(out, norm(x, gate).detach(), rtol=1e-5, atol=1e-5)


def test_the_result_has_the_dtype_of_the_gate() -> None:
    x, gate = inputs(7, 24)
    weight = torch.ones(24)
    assert reference.gated_group_norm(x.double(), gate.double(), weight.double(), 0.1).dtype is torch.float64
    assert ops("kernel").gated_group_norm(x, gate.half(), weight.half().to(x.device), 0.1).dtype is torch.float16
