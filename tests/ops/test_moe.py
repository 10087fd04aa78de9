"""Mixture of experts: routing and expert MLPs, against slow obvious code, on the host and by kernels."""

from __future__ import annotations

import importlib
import math
import os
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from repeats import slow
from slipstream.ops.gemm.moe import (
    ExpertBiases,
    Gate,
    RouterRule,
    Routing,
    SharedMatrices,
    SharedOutput,
    host,
    reference,
)

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def kernels():
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    import slipstream.ops.gemm.moe.triton

    return slipstream.ops.gemm.moe.triton


def route_by_hand(logits: list[float], rule: RouterRule, bias: list[float]) -> list[tuple[int, float]]:
    """The definition, for one token."""
    exps = [math.exp(value - max(logits)) for value in logits]
    softmax = [value / sum(exps) for value in exps]
    scores = softmax if rule.scores == "softmax" else [1 / (1 + math.exp(-value)) for value in logits]
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(logits) // rule.num_groups
    groups = [sorted(choice[group * size : (group + 1) * size], reverse=True) for group in range(rule.num_groups)]
    best = [sum(group[: 2 if rule.group_score == "top2" else 1]) for group in groups]
    kept = sorted(range(rule.num_groups), key=lambda group: -best[group])[: rule.kept_groups]
    able = [expert for expert in range(len(logits)) if expert // size in kept]
    chosen = sorted(able, key=lambda expert: -choice[expert])[: rule.top_k]
    total = sum(scores[expert] for expert in chosen) + rule.epsilon if rule.renormalize else 1.0
    return [(expert, scores[expert] / total * rule.scale) for expert in chosen]


RULES = {
    "mixtral": (8, RouterRule(2)),
    "qwen3": (128, RouterRule(8)),
    "olmoe": (64, RouterRule(8, renormalize=False)),
    "odd": (60, RouterRule(4, renormalize=False, scale=1.5)),
    "one": (4, RouterRule(1)),
    "deepseek-v2": (16, RouterRule(3, renormalize=False, scale=2.0, num_groups=4, kept_groups=2)),
    "deepseek-v3": (32, RouterRule(4, "sigmoid", True, 2.5, num_groups=8, kept_groups=4, group_score="top2")),
    "glm4": (24, RouterRule(4, "sigmoid", True, 1.0)),
    "lfm2": (32, RouterRule(4, "sigmoid", epsilon=1e-6)),
    "large epsilon": (32, RouterRule(4, "sigmoid", epsilon=0.5)),
    "odd groups": (12, RouterRule(2, "sigmoid", True, 1.0, num_groups=3, kept_groups=2, group_score="top2")),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("version", ["reference", "kernel"])
@pytest.mark.parametrize("biased", [False, True])
def test_routing_is_the_definition(name, version, biased):
    num_experts, rule = RULES[name]
    torch.manual_seed(num_experts)
    logits = torch.randn(5, num_experts + 3, device=DEVICE)[:, :num_experts]
    bias = 0.3 * torch.randn(num_experts, device=DEVICE) if biased else None
    found = (reference.route if version == "reference" else kernels().route)(logits, rule, bias)
    assert found.ids.dtype == torch.int32 and found.weights.dtype == torch.float32
    given = [0.0] * num_experts if bias is None else bias.double().tolist()
    for ids, weights, values in zip(found.ids.tolist(), found.weights.tolist(), logits.double().tolist(), strict=True):
        expected = route_by_hand(values, rule, given)
        assert ids == [expert for expert, _ in expected]
        assert weights == pytest.approx([weight for _, weight in expected], rel=1e-5)


@pytest.mark.parametrize("version", ["reference", "kernel"])
def test_padding_has_no_expert_and_adds_nothing(version):
    """Slots of padding lie in page 0. The other tokens get what they get without it."""
    x, _, gate_up, down = make(6, 32, 24, 5, 2)
    logits, rule = torch.randn(6, 5, device=DEVICE), RouterRule(2)
    slots = torch.tensor([16, 3, 900, 0, 17, 15], device=DEVICE)
    module, multiply = (reference, host.expert_mlp) if version == "reference" else (kernels(), kernels().expert_mlp)
    found, plain = module.route(logits, rule, None, slots, 16), module.route(logits, rule)
    real = [0, 2, 4]
    assert found.has_padding and not plain.has_padding
    assert found.ids[real].equal(plain.ids[real]) and found.weights[real].equal(plain.weights[real])
    assert found.ids[[1, 3, 5]].eq(5).all() and found.weights[[1, 3, 5]].eq(0).all()
    with_padding, without = multiply(x, found, gate_up, down), multiply(x, plain, gate_up, down)
    assert with_padding[[1, 3, 5]].eq(0).all()
    torch.testing.assert_close(with_padding[real], without[real], rtol=1e-6, atol=1e-6)


def test_routing_keeps_float64():
    logits = torch.randn(3, 8, dtype=torch.float64)
    routing = reference.route(logits, RouterRule(2))
    assert routing.weights.dtype == torch.float64
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(3, dtype=torch.float64), rtol=1e-15, atol=1e-15)


def test_of_equal_scores_the_kernel_takes_the_lower_expert():
    logits = torch.zeros(2, 8, device=DEVICE)
    assert kernels().route(logits, RouterRule(3)).ids.tolist() == [[0, 1, 2]] * 2


def test_the_kernel_orders_negative_scores():
    bias = torch.tensor([-2.0, -5.0, -1.5, -3.0, 0.0, -0.25, -4.0, -9.0], device=DEVICE)
    routing = kernels().route(torch.zeros(1, 8, device=DEVICE), RouterRule(6, scores="sigmoid"), bias)
    assert routing.ids.tolist() == [[4, 5, 2, 0, 3, 6]]


def test_the_kernel_chooses_different_experts_among_numbers_that_are_none():
    ids = kernels().route(torch.full((2, 8), math.nan, device=DEVICE), RouterRule(3)).ids
    assert ids.ge(0).all() and ids.lt(8).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize(
    ("num_experts", "shape"), [(4, (1, 2)), (8, (9, 2)), (60, (700, 4)), (3, (1500, 1)), (13, (1501, 3))]
)
def test_sorting_lists_each_pair_once_and_tiles_of_one_expert(num_experts, shape, size):
    kernels()
    from slipstream.ops.gemm.moe.sort import sort_by_expert

    torch.manual_seed(1)
    ids = torch.randint(0, num_experts, shape, dtype=torch.int32, device=DEVICE)
    ids[ids == 1] = 0  # an expert without tokens
    order, table, *_ = sort_by_expert(ids, num_experts, size)
    flat = ids.flatten()
    assert order.tolist() == flat.argsort(stable=True).tolist()
    seen: list[int] = []
    experts, firsts, ends = table.tolist()
    for expert, first, end in zip(experts, firsts, ends, strict=True):
        if expert >= 0:
            places = list(range(first, min(first + size, end)))
            assert places and {flat[order[place]].item() for place in places} == {expert}
            seen += places
    assert seen == list(range(len(flat)))


@pytest.mark.parametrize(("num_experts", "shape"), [(8, (9, 2)), (60, (700, 4)), (13, (1501, 3))])
def test_padded_sorting_starts_each_tile_at_a_multiple_of_its_size(num_experts, shape):
    kernels()
    from slipstream.ops.gemm.moe.sort import sort_by_expert

    ids = torch.randint(0, num_experts + 1, shape, dtype=torch.int32, device=DEVICE)  # some pairs of no expert
    ids[ids == 1] = 0
    order, table, _, positions = sort_by_expert(ids, num_experts, 16, padded=True)
    experts, firsts, ends = table.tolist()
    assert [first for expert, first in zip(experts, firsts, strict=True) if expert >= 0] == [
        16 * tile for tile in range(sum(expert >= 0 for expert in experts))
    ]
    before = dict.fromkeys(range(num_experts), -1)
    for pair, (expert, position) in enumerate(zip(ids.flatten().tolist(), positions.tolist(), strict=True)):
        if expert < num_experts:
            assert order[position] == pair and experts[position // 16] == expert and position < ends[position // 16]
            assert before[expert] < position, "stable"
            before[expert] = position


def make(tokens: int, hidden: int, inner: int, num_experts: int, top_k: int, dtype=torch.float32, skewed=False):
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden + 4, device=DEVICE).to(dtype)[:, :hidden]
    gate_up = (torch.randn(num_experts, 2 * inner, hidden, device=DEVICE) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, inner, device=DEVICE) / inner**0.5).to(dtype)
    logits = torch.randn(tokens, num_experts, device=DEVICE)
    if skewed:
        logits[:, 1] += 100  # every token
        logits[:, 0] -= 100  # no token
    return x, reference.route(logits, RouterRule(top_k)), gate_up, down


def by_hand(x, routing: Routing, gate_up, down):
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (ids, weights) in enumerate(zip(routing.ids.tolist(), routing.weights.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (gate * torch.sigmoid(gate) * up))
    return out


SHAPES = [(1, 64, 32, 8, 2), (7, 63, 100, 4, 2), (100, 32, 48, 6, 3), (33, 130, 17, 3, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("version", ["reference", "host", "kernel"])
def test_expert_mlps_are_the_definition(shape, skewed, version):
    if version == "host" and CUDA:
        pytest.skip("the CPU's")
    x, *rest = make(*shape, skewed=skewed)
    expert_mlp = {"reference": reference, "host": host}.get(version) or kernels()
    found = expert_mlp.expert_mlp(x, *rest)
    torch.testing.assert_close(found.double(), by_hand(x, *rest), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("version", ["reference", "host", "kernel"])
def test_the_shared_expert_is_added(tokens, gated, version):
    if version == "host" and CUDA:
        pytest.skip("the CPU's")
    x, *rest = make(tokens, 34, 24, 4, 2)
    out, logit = torch.randn(tokens, 34, device=DEVICE), torch.randn(tokens, 1, device=DEVICE) if gated else None
    module = {"reference": reference, "host": host}.get(version) or kernels()
    found = module.expert_mlp(x, *rest, shared=lambda: SharedOutput(out, logit))
    expected = by_hand(x, *rest) + out.double() * (1 / (1 + torch.exp(-logit.double())) if gated else 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
def test_the_next_norm_adds_the_experts_up(has_padding, has_shared):
    kernels()
    from slipstream.ops.gemm.moe.combine import combine, combine_and_norm

    _, routing, *_ = make(5, 40, 24, 5, 2)
    made, residual = torch.randn(12, 40, device=DEVICE), torch.randn(5, 40, device=DEVICE)
    positions, norm = torch.randperm(10).to(torch.int32).to(DEVICE) + 2, torch.rand(40, device=DEVICE) + 0.5
    if has_padding:
        routing = Routing(routing.ids.clone(), routing.weights, has_padding=True)
        routing.ids[3] = 5
        made[positions[6:8].long()] = torch.nan
    shared = SharedOutput(torch.randn(5, 40, device=DEVICE), torch.randn(5, 1, device=DEVICE)) if has_shared else None
    given = (made, positions, routing, 5, shared)
    normed, total = combine_and_norm(*given, residual, norm, 1e-5)
    expected = combine(*given) + residual
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(normed, F.rms_norm(expected, (40,), norm, 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 37])
@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert_like_the_others_joins_their_products(tokens, gated):
    x, routing, gate_up, down = make(tokens, 40, 24, 5, 2)
    ids, weights = routing.ids.clone(), routing.weights.clone()
    if tokens > 1:  # padding: no routed expert; or none in the whole step, as in a capture
        padding = slice(1, 2) if tokens > 5 else slice(None)
        ids[padding], weights[padding] = 4, 0.0
    routing = Routing(ids, weights, has_padding=True)
    gate = torch.randn(1, 40, device=DEVICE) if gated else None
    found = kernels().expert_mlp(
        x, routing, gate_up[:4], down[:4], shared=None, shared_matrices=SharedMatrices(gate_up[4], down[4], gate)
    )
    everyone = Routing(torch.full_like(ids[:, :1], 4), torch.ones_like(weights[:, :1]))
    own = by_hand(x, everyone, gate_up, down)
    if gate is not None:
        own *= torch.sigmoid(x.double() @ gate.double().T)
    zero = torch.zeros_like(down)
    zero[:4] = down[:4]
    torch.testing.assert_close(found.double(), by_hand(x, routing, gate_up, zero) + own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_one_token_with_more_inputs_than_a_load_has(gated, is_shared, monkeypatch):
    kernels()
    monkeypatch.setattr(importlib.import_module("slipstream.ops.gemm.moe.gemv"), "_MAX_INPUTS", 16)
    x, routing, gate_up, down = make(1, 40, 24, 5, 2)
    gate: Gate = "silu" if gated else "relu2"
    if not gated:
        gate_up = gate_up[:, :24].contiguous()
    shared = SharedMatrices(gate_up[4], down[4], None) if is_shared else None
    found = kernels().expert_mlp(x, routing, gate_up[:5], down[:5], gate=gate, shared_matrices=shared)
    expected = reference.expert_mlp(x, routing, gate_up, down, gate=gate)
    if is_shared:
        everyone = Routing(torch.full_like(routing.ids[:, :1], 4), torch.ones_like(routing.weights[:, :1]))
        expected += reference.expert_mlp(x, everyone, gate_up, down, gate=gate)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("gate", "is_shared", "top_k"),  # fewer and more experts than are loaded ahead
    [
        ("silu", 1, 2),
        slow("silu", 0, 2),
        slow("silu", 1, 6),
        ("silu", 0, 6),
        ("gelu_tanh", 1, 2),
        ("clamped_swiglu", 0, 2),
    ],
)
def test_one_token_by_programs_with_an_output_of_all_experts(gate, is_shared, top_k, monkeypatch):
    kernels()
    module = importlib.import_module("slipstream.ops.gemm.moe.gemv")
    monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
    x, routing, gate_up, down = make(1, 1030, 8, 7, top_k)
    assert module.is_one_wave(top_k + is_shared, 8, 1030, gate, x.device)
    calls, real = [], module.multiply_gate_up
    gemv = importlib.import_module("slipstream.ops.gemm.moe.gemv")
    monkeypatch.setattr(gemv, "multiply_gate_up", lambda *args: (calls.append(1), real(*args)))
    shared = SharedMatrices(gate_up[4], down[4], None) if is_shared else None
    found = kernels().expert_mlp(x, routing, gate_up, down, gate=gate, shared_matrices=shared)
    expected = reference.expert_mlp(x, routing, gate_up, down, gate=gate)
    if is_shared:
        everyone = Routing(torch.full_like(routing.ids[:, :1], 4), torch.ones_like(routing.weights[:, :1]))
        expected += reference.expert_mlp(x, everyone, gate_up, down, gate=gate)
    assert calls == [1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def fill_with_nan(x):
    return x.fill_(torch.nan) if x.is_floating_point() else x


@pytest.mark.every_second("hidden", "is_shared")
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 24), (104, 17), (24, 300)])
def test_one_token_in_bfloat16(hidden, inner, is_shared):
    assert_one_token_is_close(hidden, inner, is_shared)


def assert_one_token_is_close(hidden, inner, is_shared):
    """One of the chosen experts is none."""
    x, routing, gate_up, down = make(1, hidden, inner, 6, 3, torch.bfloat16)
    routing.ids[0, 1], routing.weights[0, 1] = 6, 0.0
    routing = Routing(routing.ids, routing.weights, has_padding=True)
    x, own = x.contiguous(), torch.randn(3, 2 * inner, hidden, device=DEVICE).bfloat16()[1] / 8
    by_gate = torch.randn(1, hidden, device=DEVICE).bfloat16()
    shared = SharedMatrices(own, down[2].clone(), by_gate) if is_shared else None
    empty = torch.empty
    with mock.patch.object(torch, "empty", lambda *size, **rest: fill_with_nan(empty(*size, **rest))):
        found = kernels().expert_mlp(x, routing, gate_up, down, shared_matrices=shared)
    real = Routing(routing.ids[:, [0, 2]], routing.weights[:, [0, 2]])
    expected = by_hand(x, real, gate_up, down)
    if is_shared:
        everyone = Routing(torch.zeros_like(real.ids[:, :1]), torch.ones_like(real.weights[:, :1]))
        opened = torch.sigmoid(x.double() @ by_gate.double().T)
        expected += opened * by_hand(x, everyone, own[None], down[2:3])
    torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("is_shared", [True, False])
def test_down_of_one_token_sums_the_experts(is_shared, monkeypatch):
    kernels()
    calls = []
    module = importlib.import_module("slipstream.ops.gemm.moe.gemv")
    multiply = module.multiply_down
    monkeypatch.setattr(module, "multiply_down", lambda *args: (calls.append(1), multiply(*args))[1])
    assert_one_token_is_close(24, 300, is_shared)
    assert calls


def gated_by_hand(gate: float, up: float, kind: Gate) -> float:
    """The definitions."""
    if kind == "clamped_swiglu":
        gate, up = min(gate, 7.0), min(max(up, -7.0), 7.0)
        return (up + 1) * gate / (1 + math.exp(-1.702 * gate))
    if kind == "relu2":  # without gates both are the same
        return max(gate, 0.0) * max(up, 0.0)
    if kind == "gelu_tanh":
        return gate * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    return gate / (1 + math.exp(-gate)) * up


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("version", ["reference", "host", "kernel"])
def test_gates_and_biases_are_the_definition(kind, biased, version):
    if version == "host" and CUDA:
        pytest.skip("the CPU's")
    x, routing, gate_up, down = make(11, 30, 24, 5, 2)
    gate_up *= 6  # beyond the limit of the clamp
    if kind == "relu2":
        gate_up = gate_up[:, :24].contiguous() / 6
    given = ExpertBiases(torch.randn(gate_up.shape[:2], device=DEVICE), torch.randn(5, 30, device=DEVICE))
    biases = given if biased else None
    module = {"reference": reference, "host": host}.get(version) or kernels()
    found = module.expert_mlp(x, routing, gate_up, down, False, biases, kind)
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(routing.ids.tolist(), routing.weights.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            made = gate_up[expert].double() @ x[token].double() + (biases.gate_up[expert].double() if biases else 0)
            gate, up = (made.cpu(), made.cpu()) if kind == "relu2" else made.cpu().chunk(2)
            inner = [gated_by_hand(*pair, kind) for pair in zip(gate.tolist(), up.tolist(), strict=True)]
            out = down[expert].cpu().double() @ torch.tensor(inner, dtype=torch.float64)
            expected[token] += weight * (out + (biases.down[expert].cpu().double() if biases else 0))
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["silu", "clamped_swiglu"])
def test_versions_agree_in_float64(kind):
    x, routing, gate_up, down = make(9, 64, 32, 8, 2)
    args = x.double(), Routing(routing.ids, routing.weights.double()), gate_up.double(), down.double()
    more = dict(biases=ExpertBiases(gate_up[:, :, 0].double(), down[:, :, 0].double()), gate=kind)
    torch.testing.assert_close(
        host.expert_mlp(*args, **more), reference.expert_mlp(*args, **more), rtol=1e-13, atol=1e-13
    )


def test_no_tokens_are_no_rows():
    for expert_mlp in (host, kernels()):
        x, routing, gate_up, down = make(2, 64, 32, 8, 2)
        assert expert_mlp.expert_mlp(x[:0], Routing(routing.ids[:0], routing.weights[:0]), gate_up, down).shape == (
            0,
            64,
        )


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_of_both_products_fit_each_other_and_the_shared_memory(itemsize):
    kernels()
    from slipstream.ops.gemm.moe.sort import grouped_tile

    for each in (0.1, 1, 8, 16, 40, 64, 65, 1000):
        tiles = [grouped_tile(each, inward, itemsize) for inward in (True, False)]
        assert tiles[0].pairs == tiles[1].pairs
        for tile, num_columns in zip(tiles, (2 * tiles[0].outputs, tiles[1].outputs), strict=True):
            buffers = tile.stages if itemsize == 2 else tile.stages - 1  # as Triton allocates them
            assert (tile.pairs + num_columns) * tile.inputs * itemsize * buffers <= 232_448, tile


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 16, 256, 2048])
def test_bfloat16_products_are_captured_and_close(tokens):
    x, routing, gate_up, down = make(tokens, 512, 256, 32, 4, torch.bfloat16)
    assert_captured_and_close(x, routing, gate_up, down)


@pytest.mark.cuda
@pytest.mark.parametrize(("tokens", "inner"), [(2, 256), (7, 768), (16, 512)])
@pytest.mark.parametrize("num_experts", [8, 60])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_products_of_few_tokens_on_hopper(tokens, inner, num_experts, is_shared, kind, monkeypatch):
    """One token has no expert, one expert has all others, one has none."""
    from slipstream.ops.gemm.moe import streaming_hopper

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not Hopper")
    calls = []
    stream = streaming_hopper.streaming_pairs
    monkeypatch.setattr(streaming_hopper, "streaming_pairs", lambda *args: (calls.append(1), stream(*args))[1])
    x, routing, gate_up, down = make(tokens, 512, inner, num_experts, 4, torch.bfloat16, skewed=True)
    routing.ids[1] = num_experts
    routing = Routing(routing.ids, torch.rand_like(routing.weights) + 0.1, has_padding=True)
    x, shared = x.contiguous(), None
    if is_shared:
        shared = SharedMatrices(gate_up[2] * 1, down[2] * 1, torch.randn(1, 512, device=DEVICE).to(x.dtype) / 20)
    given = {"gate": kind, "shared": (lambda: SharedOutput(x)) if is_shared else None, "shared_matrices": shared}
    kernels().expert_mlp(x, routing, gate_up, down, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels().expert_mlp(x, routing, gate_up, down, **given)
    out.fill_(torch.nan)
    graph.replay()
    assert calls

    def wide(ids, weights):
        routing = Routing(ids, weights.double())
        return reference.expert_mlp(x.double(), routing, gate_up.double(), down.double(), gate=kind)

    expected = wide(routing.ids, routing.weights)
    if shared is not None:
        opened = torch.sigmoid(x.double() @ shared.gate.double().t())
        expected += opened * wide(torch.full_like(routing.ids[:, :1], 2), torch.ones_like(routing.weights[:, :1]))
    torch.testing.assert_close(out.double(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("inner", [128, 640])
@pytest.mark.parametrize("num_experts", [4, 30])
def test_products_of_many_tokens_on_hopper(skewed, inner, num_experts, monkeypatch):
    """Experts with no token, with all, and with a last tile of any size. Some tokens have no expert."""
    from slipstream.ops.gemm.moe import gemm_hopper

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not Hopper")
    calls = []
    multiply = gemm_hopper.multiply_down
    monkeypatch.setattr(gemm_hopper, "multiply_down", lambda *args: (calls.append(1), multiply(*args))[1])
    x, routing, gate_up, down = make(num_experts * 131, 512, inner, num_experts, 2, torch.bfloat16, skewed)
    routing.ids[5:9] = num_experts
    routing = Routing(routing.ids, routing.weights, has_padding=True)
    assert_captured_and_close(x.contiguous(), routing, gate_up, down)
    assert calls


def assert_captured_and_close(x, routing, gate_up, down):
    kernels().expert_mlp(x, routing, gate_up, down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels().expert_mlp(x, routing, gate_up, down)
    out.zero_()
    graph.replay()
    for rows in (slice(0, 64), slice(-64, None)):
        ids, weights = routing.ids[rows], routing.weights[rows]
        real = ids[:, 0] < len(gate_up)
        expected = by_hand(x[rows][real], Routing(ids[real], weights[real]), gate_up, down)
        torch.testing.assert_close(out[rows][real].double(), expected, rtol=3e-2, atol=3e-2)
