"""Causal convolution over packed rows: whole, cut anywhere, with saves and padding; by the reference and the kernel."""

from __future__ import annotations

import os

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from hand_steps import StepRow, hand_steps
from slipstream.ops.recurrent import replay

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def conv_of(version: str):
    if version == "reference":
        return replay.causal_conv1d
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.recurrent import conv1d_triton as kernels

    return kernels.causal_conv1d


VERSIONS = pytest.mark.parametrize("version", ["reference", "kernel"])
CHANNELS, SLOTS = 20, 9


class Conv:
    """Rows of random inputs, and what transformers makes of each whole row."""

    def __init__(self, lengths: dict[int, int], width: int = 4, dtype=torch.float32, bias: bool = False) -> None:
        """`lengths`: by slot."""
        torch.manual_seed(width)
        self.weight = torch.randn(CHANNELS, width, dtype=dtype, device=DEVICE)
        self.bias = torch.randn(CHANNELS, dtype=dtype, device=DEVICE) if bias else None
        self.state = torch.full((SLOTS, CHANNELS, width), torch.nan, dtype=dtype, device=DEVICE)
        self.x = {slot: torch.randn(n, CHANNELS, dtype=dtype, device=DEVICE) for slot, n in lengths.items()}
        self.expected = {
            slot: causal_conv1d_fn(x.t()[None], self.weight, self.bias, "silu")[0].t() for slot, x in self.x.items()
        }

    def run(self, version: str, rows: list[StepRow], **padding: int) -> None:
        """Computes some tokens of the rows and compares; row by row, then the padding."""
        steps = hand_steps(rows, device=DEVICE, **padding)
        x = torch.cat([self.x[row.slot][row.first : row.first + row.count] for row in rows])
        total = max(padding.get("num_tokens", 0), int(steps.num_tokens.sum()))
        packed = torch.full((total, CHANNELS + 3), torch.nan, dtype=x.dtype, device=DEVICE)
        packed[: len(x), :CHANNELS] = x
        out = conv_of(version)(packed[:, :CHANNELS], self.weight, self.bias, self.state, steps, "silu")
        expected = torch.cat([self.expected[row.slot][row.first : row.first + row.count] for row in rows])
        torch.testing.assert_close(out[: len(x)], expected, rtol=1e-5, atol=1e-5)
        if not steps.is_single:
            assert not out[len(x) :].any(), "tokens of no row must get zeros"


@VERSIONS
@pytest.mark.parametrize(("width", "bias"), [(4, False), (3, True), (2, False)])
def test_rows_cut_anywhere_equal_transformers(version, width, bias):
    conv = Conv({1: 150, 4: 70, 2: 3}, width, bias=bias)
    conv.run(version, [StepRow(4, 0, 1), StepRow(1, 0, 67)])
    conv.run(version, [StepRow(4, 1, 1), StepRow(1, 67, 1), StepRow(2, 0, 1)], padding=2)
    conv.run(version, [StepRow(2, 1, 2), StepRow(4, 2, 67), StepRow(1, 68, 80)], padding=1, num_tokens=160)
    conv.run(version, [StepRow(4, 69, 1), StepRow(1, 148, 1)])
    conv.run(version, [StepRow(1, 149, 1)])


@VERSIONS
@pytest.mark.parametrize("chunked", [False, True])
def test_a_save_continues_as_its_row_does(version, chunked):
    conv = Conv({1: 200, 4: 200, 2: 70})
    if chunked:
        rows = [StepRow(2, 0, 10), StepRow(1, 0, 130, {64: 5, 128: 6}), StepRow(4, 0, 64, {64: 7})]
        conv.run(version, rows, padding=1)
        resumed = {5: (1, 64), 6: (1, 128), 7: (4, 64)}
    else:
        conv.run(version, [StepRow(1, 0, 63), StepRow(4, 0, 127)])
        conv.run(version, [StepRow(1, 63, 1, {64: 5}), StepRow(4, 127, 1, {128: 7}), StepRow(2, 0, 1)])
        resumed = {5: (1, 64), 7: (4, 128)}
    for slot, (source, _) in resumed.items():
        conv.x[slot], conv.expected[slot] = conv.x[source], conv.expected[source]
    conv.run(version, [StepRow(slot, first, 2) for slot, (_, first) in resumed.items()])
    conv.run(version, [StepRow(slot, first + 2, 1) for slot, (_, first) in resumed.items()])


def test_float64_stays_float64():
    conv = Conv({1: 100}, dtype=torch.float64)
    steps = hand_steps([StepRow(1, 0, 100)], device=DEVICE)
    out = replay.causal_conv1d(conv.x[1], conv.weight, None, conv.state, steps, "silu")
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, conv.expected[1], rtol=1e-12, atol=1e-12)
