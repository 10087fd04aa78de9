"""Gated delta rule over packed rows: against transformers, chunked against recurrent, by the reference and kernels."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from hand_steps import REPEATING_STEPS, SeenPositions, StepRow, hand_steps
from slipstream.contracts.cache_spec import DEFER_PERIOD
from slipstream.ops.elementwise.reference import gated_rms_norm
from slipstream.ops.recurrent import DeltaWeights, delta_rule
from slipstream.ops.recurrent.replay import causal_conv1d

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
VERSIONS = pytest.mark.parametrize("version", ["reference", "kernel"])


def ops(version: str):
    if version == "reference":
        return delta_rule
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.recurrent import delta_triton as kernels

    return kernels


KEY_HEADS, HEADS, KEY_DIM, DIM, SLOTS = 2, 4, 16, 32, 9
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}


class Rule:
    """Inputs of some rows by slot, and the outputs of each row computed token by token."""

    def __init__(self, lengths: dict[int, int], dtype=torch.float32, key_dim=KEY_DIM, dim=DIM, key_heads=KEY_HEADS):
        torch.manual_seed(len(lengths))
        self.key_dim, self.dim = key_dim, dim
        self.state = torch.full((SLOTS, 2, HEADS, key_dim, dim), torch.nan, dtype=dtype, device=DEVICE)[:, 1]
        self.inputs = {slot: self.random(n, dtype, key_heads) for slot, n in lengths.items()}
        self.expected = {slot: self.by_token(inputs) for slot, inputs in self.inputs.items()}

    def random(self, count: int, dtype: torch.dtype, key_heads: int) -> list[torch.Tensor]:
        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(count, *shape, dtype=dtype, device=DEVICE)

        q, k = rand(key_heads, self.key_dim), rand(key_heads, self.key_dim)
        k[1::3] = k[::3][: len(k[1::3])]  # neighbours with one key: the system of a chunk is far from diagonal
        return [q, k, rand(HEADS, self.dim), -rand(HEADS).abs() * 0.2, rand(HEADS).sigmoid()]

    def by_token(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """The definition."""
        q, k, v, g, beta = inputs
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (q, k))
        held, out = torch.zeros(HEADS, self.key_dim, self.dim, dtype=v.dtype, device=v.device), []
        for t in range(len(v)):
            held = held * g[t].exp()[:, None, None]
            delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", held, k[t]))
            held = held + torch.einsum("hk,hv->hkv", k[t], delta)
            out.append(torch.einsum("hkv,hk->hv", held, q[t]) * self.key_dim**-0.5)
        return torch.stack(out)

    def run(self, version: str, rows: list[StepRow], chunked: bool = False, **padding: int) -> None:
        steps = hand_steps(rows, device=DEVICE, chunked=chunked, **padding)
        total = max(padding.get("num_tokens", 0), int(steps.num_tokens.sum()))
        spans = [(row.slot, slice(row.first, row.first + row.count)) for row in rows]
        packed = []
        for part in range(5):
            found = torch.cat([self.inputs[slot][part][span] for slot, span in spans])
            packed.append(torch.full((total, *found.shape[1:]), torch.nan, dtype=found.dtype, device=DEVICE))
            packed[-1][: len(found)] = found
        out = ops(version).gated_delta_rule(*packed, self.state, steps, self.key_dim**-0.5)
        expected = torch.cat([self.expected[slot][span] for slot, span in spans])
        assert out.dtype == expected.dtype
        tolerance = TOLERANCE[out.dtype]
        torch.testing.assert_close(out[: len(expected)], expected, rtol=tolerance, atol=tolerance)
        if not steps.is_single:
            assert not out[len(expected) :].any(), "tokens of no row must get zeros"


@pytest.mark.parametrize("length", [1, 5, 64, 150])
def test_the_definition_is_what_transformers_computes(length):
    rule = Rule({1: length})
    q, k, v, g, beta = (x[None] for x in rule.inputs[1])
    q, k = (x.repeat_interleave(2, 2) for x in (q, k))
    for theirs in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        out, _ = theirs(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        torch.testing.assert_close(out[0], rule.expected[1], rtol=1e-4, atol=1e-5)


def steps_of_three_rows(rule: Rule, version: str) -> None:
    """Cuts inside chunks, at their borders, single tokens among chunks, padding."""
    rule.run(version, [StepRow(4, 0, 1), StepRow(1, 0, 67)])
    rule.run(version, [StepRow(4, 1, 1), StepRow(1, 67, 1), StepRow(2, 0, 1)], padding=2)
    rule.run(version, [StepRow(2, 1, 1), StepRow(4, 2, 66), StepRow(1, 68, 60)], padding=1, num_tokens=140)
    rule.run(version, [StepRow(4, 68, 1), StepRow(1, 128, 64)])
    rule.run(version, [StepRow(2, 2, 1), StepRow(4, 69, 1), StepRow(1, 192, 1)], chunked=True)
    rule.run(version, [StepRow(1, 193, 7)])


@VERSIONS
def test_rows_cut_anywhere_equal_the_definition(version):
    steps_of_three_rows(Rule({1: 200, 4: 70, 2: 3}), version)


def test_chunks_equal_single_tokens_in_float64():
    steps_of_three_rows(Rule({1: 200, 4: 70, 2: 3}, torch.float64), "reference")


@VERSIONS
@pytest.mark.parametrize(("key_dim", "dim", "key_heads"), [(24, 20, 4), (8, 48, 1)])
def test_odd_sizes(version, key_dim, dim, key_heads):
    rule = Rule({1: 90, 2: 40}, key_dim=key_dim, dim=dim, key_heads=key_heads)
    rule.run(version, [StepRow(1, 0, 80), StepRow(2, 0, 39)])
    rule.run(version, [StepRow(1, 80, 1), StepRow(2, 39, 1)])


@VERSIONS
@pytest.mark.parametrize("chunked", [False, True])
def test_a_save_continues_as_its_row_does(version, chunked):
    rule = Rule({1: 200, 4: 200, 2: 70})
    if chunked:
        rows = [StepRow(2, 0, 10), StepRow(1, 0, 130, {64: 5, 128: 6}), StepRow(4, 0, 64, {64: 7})]
        rule.run(version, rows, padding=1)
        resumed = {5: (1, 64), 6: (1, 128), 7: (4, 64)}
    else:
        rule.run(version, [StepRow(1, 0, 63), StepRow(4, 0, 127)])
        rule.run(version, [StepRow(1, 63, 1, {64: 5}), StepRow(4, 127, 1, {128: 7}), StepRow(2, 0, 1)])
        resumed = {5: (1, 64), 7: (4, 128)}
    for slot, (source, _) in resumed.items():
        rule.inputs[slot], rule.expected[slot] = rule.inputs[source], rule.expected[source]
    rule.run(version, [StepRow(slot, first, 2) for slot, (_, first) in resumed.items()])
    rule.run(version, [StepRow(slot, first + 2, 1) for slot, (_, first) in resumed.items()])
    untouched = [slot for slot in range(SLOTS) if slot not in {0, 1, 2, 4, *resumed}]
    assert rule.state[untouched].isnan().all()


@VERSIONS
def test_gates(version):
    torch.manual_seed(0)
    a, b = torch.randn(2, 7, HEADS + 2, device=DEVICE)[:, :, :HEADS].unbind(0)
    a_log, dt_bias = torch.randn(HEADS, device=DEVICE), torch.randn(HEADS, device=DEVICE)
    a.mul_(30)  # softplus of large numbers must stay finite
    g, beta = ops(version).delta_gates(a, b, a_log, dt_bias)
    torch.testing.assert_close(g, -a_log.exp() * torch.nn.functional.softplus(a + dt_bias))
    torch.testing.assert_close(beta, b.sigmoid())


@pytest.mark.parametrize(("dim", "key_heads", "splits"), [(64, 1, 4), (64, 1, 2), (80, 1, 1), (24, 2, 1)])
def test_the_decode_kernel_is_the_parts_one_by_one(dim, key_heads, splits, monkeypatch):
    torch.manual_seed(0)
    ops("kernel")
    decode = importlib.import_module("slipstream.ops.recurrent.delta_decode_kernel")
    assert decode.num_splits(2, 64) == 4 and decode.num_splits(2, 32) == 2 and decode.num_splits(1000, 64) == 1
    assert decode.num_splits(512, 128) == 2 and decode.num_splits(513, 128) == 1
    monkeypatch.setattr(decode, "num_splits", lambda num_heads, block: splits)
    heads, key_size, value_size = 2, key_heads * KEY_DIM, 2 * dim
    channels = 2 * key_size + value_size

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    weights = DeltaWeights(rand(channels, 4), rand(heads), rand(heads), rand(dim), 1e-3)
    states = [
        [torch.full((SLOTS, channels, 4), torch.nan), torch.full((SLOTS, heads, KEY_DIM, dim), torch.nan)]
        for _ in range(2)
    ]
    states = [[state.to(DEVICE) for state in pair] for pair in states]
    rows = {5: 0, 3: 0}  # slot to position
    for step in range(4):
        if step == 2:  # a row joins, and the next token of another is the last of a chunk
            rows |= {4: 0, 5: 63}
            for pair in zip(*states, strict=True):
                pair[0][5] = pair[1][5] = rand(*pair[0][5].shape)
        ends = [StepRow(slot, position, 1, {64: 8} if slot == 5 else {}) for slot, position in rows.items()]
        steps = hand_steps(ends, padding=step % 2, device=DEVICE)
        parts = rand(len(steps.slots), channels + value_size + 2 * heads).split([channels, value_size, heads, heads], 1)
        found, expected = (
            ops(version).delta_decode(*parts, weights, *pair, steps)
            for version, pair in zip(("kernel", "reference"), states, strict=True)
        )
        torch.testing.assert_close(found[: len(ends)], expected[: len(ends)], rtol=1e-4, atol=1e-4)
        rows = {slot: position + 1 for slot, position in rows.items()}
    for slot in (3, 5, 8):
        for found, expected in zip(*states, strict=True):
            torch.testing.assert_close(found[slot], expected[slot], rtol=1e-4, atol=1e-4, equal_nan=True)
    assert not states[0][1][8].isnan().any(), "slot 8 has a save"


@pytest.mark.parametrize(
    ("version", "dim", "key_heads", "splits", "period"),
    [
        ("kernel", 64, 1, 4, DEFER_PERIOD),
        ("kernel", 80, 1, 1, 8),
        ("kernel", 24, 2, 1, 1),
        ("reference", 24, 2, 1, 1),
    ],
)
def test_positions_computed_again_and_deferred_stores_change_no_result(
    version, dim, key_heads, splits, period, monkeypatch
):
    """Steps of one and of several tokens, against each row's tokens in one step."""
    torch.manual_seed(0)
    own, convolve = ops(version), causal_conv1d
    if version == "kernel":
        convolve = importlib.import_module("slipstream.ops.recurrent.conv1d_triton").causal_conv1d
        decode = importlib.import_module("slipstream.ops.recurrent.delta_decode_kernel")
        monkeypatch.setattr(decode, "num_splits", lambda num_heads, block: splits)
    heads, key_size, value_size = 2, key_heads * KEY_DIM, 2 * dim
    channels = 2 * key_size + value_size

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    def unset(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, device=DEVICE)

    weights = DeltaWeights(rand(channels, 4), rand(heads), rand(heads), rand(dim), 1e-3)
    conv, state = unset(SLOTS, channels, 4), unset(SLOTS, heads, KEY_DIM, dim)
    deferred = unset(SLOTS, heads, period - 1, KEY_DIM + dim + 4) if period > 1 else None

    def parts_of(rows):
        found = torch.cat([inputs[row.slot][row.first : row.first + row.count] for row in rows])
        return found.split([channels, value_size, heads, heads], 1)

    def rule(version, convolve, rows, conv, state, kept=None):
        """Before the norm."""
        qkv, _, b, a = parts_of(rows)
        steps = hand_steps(rows, padding=1, device=DEVICE)
        q, k, v = delta_rule._heads(convolve(qkv, weights.conv, None, conv, steps, "silu"), state)
        g, beta = delta_rule.delta_gates(a, b, weights.a_log, weights.dt_bias)
        return version.gated_delta_rule(q, k, v, g, beta, state, steps, KEY_DIM**-0.5, deferred=kept)

    inputs = {slot: rand(130, channels + value_size + 2 * heads) for slot in (3, 4, 5, 6)}
    whole = unset(SLOTS, heads, KEY_DIM, dim)
    rows = [StepRow(slot, 0, 130, {64: 8} if slot == 5 else {}) for slot in inputs]
    expected = rule(delta_rule, causal_conv1d, rows, torch.zeros_like(conv), whole).split(130)
    expected = dict(zip(inputs, expected, strict=True))
    seen = SeenPositions(period)
    for number, spans in enumerate(REPEATING_STEPS):
        saves = {5: {64: 8 if number == 6 else 7}} if spans.get(5) == (63, 1) else {}
        rows = seen.rows(spans, saves)
        wanted = torch.cat([expected[row.slot][row.first : row.first + row.count] for row in rows])
        if all(row.count == 1 for row in rows):
            parts = parts_of(rows)
            steps = hand_steps(rows, device=DEVICE)
            found = own.delta_decode(*parts, weights, conv, state, steps, None, deferred)
            wanted = gated_rms_norm(wanted, parts[1].unflatten(1, (-1, dim)), weights.norm, weights.eps).flatten(1)
        else:
            found = rule(own, convolve, rows, conv, state, deferred)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for saved in (7, 8):
        torch.testing.assert_close(state[saved], whole[8], rtol=1e-4, atol=1e-4)
