"""The three kernels of a step of one token, against the definition of each part."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from slipstream.ops.moe import RouterRule, SharedOutput, reference
from slipstream.ops.norm import reference as norms

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the interpreter's own use of numpy


def kernels():
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.moe.triton import one_token

    return one_token


def made(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) / shape[-1] ** 0.5).to(torch.bfloat16)


# experts, rule, hidden, inner, inner of the shared expert (0: none), whether it has a gate
CASES = {
    "qwen3": (6, RouterRule(2), 24, 8, 0, False),
    "next": (5, RouterRule(2, scale=1.5), 16, 8, 16, True),
    "deepseek": (8, RouterRule(2, "sigmoid", True, 2.5, 4, 2, "top2"), 16, 8, 8, False),
    "many": (132, RouterRule(2, renormalize=False), 16, 8, 0, False),
    "blocks": (4, RouterRule(2), 20, 16, 24, True),  # rows longer than one load
}


def expected_of(x, residual, norm, router, bias, rule, gate_up, down, shared, logits=None):
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    normed = norms.rms_norm(total, norm, 1e-6)
    if logits is None:
        logits = normed.float() @ router.float().T
    routing = reference.route(logits.to(x.dtype), rule, bias)
    beside = None
    if shared is not None:
        gate, up = (normed.double() @ shared.gate_up.double().T).chunk(2, 1)
        out = (gate * gate.sigmoid() * up) @ shared.down.double().T
        beside = SharedOutput(out, None if shared.gate is None else normed.double() @ shared.gate.double().T)
    routing = routing._replace(weights=routing.weights.double())
    mlp = reference.expert_mlp(normed.double(), routing, gate_up.double(), down.double())
    return (mlp if beside is None else beside.added_to(mlp)), total


@pytest.mark.parametrize("name", CASES)
def test_one_token_is_the_sum_over_its_experts(name, monkeypatch):
    module = kernels()
    if name == "blocks":
        monkeypatch.setattr(module, "GATE_UP_TILE", module.OneTokenTile(2, 8, 4))
        monkeypatch.setattr(module, "DOWN_TILE", module.OneTokenTile(1, 8, 4))
    num_experts, rule, hidden, inner, shared_size, gated = CASES[name]
    torch.manual_seed(3)
    x, residual, norm = made(1, hidden) * 9, made(1, hidden) * 5, 1 + made(hidden)
    router = made(num_experts, hidden) * 9
    bias = torch.randn(num_experts, device=DEVICE) * 0.2 if rule.scores == "sigmoid" else None
    gate_up, down = made(num_experts, 2 * inner, hidden) * 3, made(num_experts, hidden, inner) * 3
    shared = None
    if shared_size:
        gate = made(1, hidden) * 5 if gated else None
        shared = module.SharedExpert(made(2 * shared_size, hidden) * 3, made(hidden, shared_size) * 3, gate)
    given = module.Router(router, rule, bias)
    assert module.can_run(given, gate_up, down, shared)
    for before in (
        (residual, None) if name == "qwen3" else (residual,)
    ):  # twice: the counter of finished programs is 0 again
        out, total = module.experts_of_one_token(x, before, norm, 1e-6, given, gate_up, down, shared)
        expected, sums = expected_of(x, before, norm, router, bias, rule, gate_up, down, shared)
        torch.testing.assert_close(total, sums, rtol=1e-2, atol=1e-2)  # the interpreter rounds down
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def test_equal_scores_take_the_lower_experts_and_padding_takes_none():
    module = kernels()
    x, norm, router = made(1, 16), torch.ones(16, device=DEVICE, dtype=torch.bfloat16), made(8, 16) * 0
    gate_up, down = made(8, 16, 16), made(8, 16, 8)
    for slot, experts in ((20, [0, 1, 2]), (3, [])):
        slots = torch.tensor([slot], device=DEVICE)
        given = module.Router(router, RouterRule(3), None, slots, 16)
        out, _ = module.experts_of_one_token(x, None, norm, 1e-6, given, gate_up, down)
        logits = torch.zeros(1, 8, device=DEVICE)
        logits[:, experts] = 30
        expected, _ = expected_of(x, None, norm, router, None, RouterRule(3), gate_up, down, None, logits)
        expected = expected if experts else torch.zeros_like(expected)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_gives_its_weights_to_the_kernels(shared):
    """The layer's own computation, and the kernels with the weights that the layer hands over."""
    kernels()
    from slipstream.nn.layers.experts import Experts
    from slipstream.nn.layers.layer import Layout
    from slipstream.nn.layers.one_token_experts import one_token_experts
    from slipstream.nn.shapes import ExpertShape, MlpShape
    from slipstream.nn.weight_format import Unquantized

    shape = ExpertShape(
        num_experts=4,
        size=8,
        router=RouterRule(2),
        shared=MlpShape(size=8, activation="silu", name="shared") if shared else None,
        shared_gate=shared,
    )
    layout = Layout(16, torch.bfloat16, lambda name: Unquantized(torch.bfloat16))
    with torch.device(DEVICE):
        layer = Experts("mlp", shape, layout)
    torch.manual_seed(5)
    for weight in layer.parameters():
        weight.copy_(2 * made(*weight.shape))
    x, norm = made(1, 16) * 4, torch.ones(16, device=DEVICE, dtype=torch.bfloat16)
    run = one_token_experts(layer.parts_of_layer(), None, 0)
    assert run is not None
    out, _ = run(x, None, norm, 1e-6)
    normed = norms.rms_norm(x, norm, 1e-6)
    routing = reference.route(layer.router(normed), shape.router)
    expected = reference.expert_mlp(normed, routing, layer.gate_up, layer.down)
    if layer.shared is not None and layer.shared_gate is not None:
        expected = SharedOutput(layer.shared(normed, None), layer.shared_gate(normed)).added_to(expected)
    torch.testing.assert_close(out, expected, rtol=4e-2, atol=4e-2 * expected.abs().max().item())
    biased = layer.parts_of_layer()._replace(shape=replace(shape, bias=True))
    assert one_token_experts(biased, None, 0) is None


@pytest.mark.cuda
def test_one_token_at_real_sizes_in_a_graph():
    """Sizes of Qwen3-30B-A3B and of Qwen3-Next; the kernels of four layers overlap by dependent launch."""
    module = kernels()
    for num_experts, rule, inner, shared_size in ((128, RouterRule(8), 768, 0), (64, RouterRule(10), 512, 512)):
        torch.manual_seed(1)
        x, norm = made(1, 2048) * 40, 1 + made(2048)
        layers = []
        for _ in range(4):
            shared = None
            if shared_size:
                shared = module.SharedExpert(made(2 * shared_size, 2048), made(2048, shared_size), made(1, 2048))
            router = module.Router(made(num_experts, 2048), rule)
            layers.append((router, made(num_experts, 2 * inner, 2048), made(num_experts, 2048, inner), shared))

        def run(x, norm=norm, layers=layers):
            results, residual = [], None
            for layer in layers:
                x, residual = module.experts_of_one_token(x, residual, norm, 1e-6, *layer)
                results.append((x, residual))
            return results

        eager = [[part.clone() for part in result] for result in run(x)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(x)
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        previous = (x, None)
        for (out, total), kept, (router, gate_up, down, shared) in zip(found, eager, layers, strict=True):
            assert out.equal(kept[0]) and total.equal(kept[1])
            given = (*previous, norm, router.weight, None, rule, gate_up, down, shared)
            expected, _ = expected_of(*given)
            torch.testing.assert_close(out.double(), expected, rtol=3e-2, atol=3e-2 * expected.abs().max().item())
            previous = (out, total)
