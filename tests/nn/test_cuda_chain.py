"""Layers as a chain of products that add residuals themselves, against the same layers one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hand_batch import HandRunner
from hand_cache import one_group
from hand_load import load
from slipstream.checkpoint.model_info import RopeInfo
from slipstream.nn import chains
from slipstream.nn.chains import CudaChain
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.nn.decoder import Decoder, DecoderShape, RopeShape
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import RMSNorm
from slipstream.nn.shapes import AttentionShape, LayerShape, MlpShape, NormShape
from slipstream.nn.weights.kinds import BatchInvariant
from slipstream.nn.weights.weight_format import Unquantized
from slipstream.ops.elementwise import rms_norm, silu_and_mul
from slipstream.ops.gemm.chains import Unnormalized
from slipstream.ops.gemm.description import Activation, AddTo, Gemm, GemmKernel
from slipstream.ops.gemm.linear import dispatch
from slipstream.ops.gemm.linear.dispatch import MAX_STREAMING_ROWS_OF_LARGE_WEIGHT
from slipstream.ops.gemm.lora import LoraTiles, LoraWeights
from slipstream.ops.gemm.lora.reference import make_blocks, make_tiles, num_counters, tile_size
from slipstream.ops.gemm.quantized import QuantizedMatrix
from slipstream.ops.gemm.quantized.matrix import LayerGemms
from slipstream.ops.gemm.table import TABLE, add_product, choose_chain
from tiny import write_tiny

PROMPTS = {"a": [5, 9, 33, 2, 71], "b": list(range(3, 40)), "c": [8]}
NEXT = [{"a": [7], "b": [11], "c": [13]}, {"b": [40]}, {"a": [4], "b": [5], "c": [6]}]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step ran as a chain. Here it may run on any device and in any dtype."""
    made: list[bool] = []
    run = CudaChain.run

    def counted(self, *args):
        out = run(self, *args)
        made.append(out is not None)
        return out

    monkeypatch.setattr(CudaChain, "run", counted)
    monkeypatch.setattr(chains, "choose_chain", lambda x, weights, is_streaming=False: "library")
    return made


def chained(model: Decoder) -> Decoder:
    found = CudaChain.of(list(model.layers), model.norm)
    model.implementations = () if found is None else (found,)
    return model


def one_by_one(model: Decoder) -> Decoder:
    model.implementations = ()
    return model


def steps(model: Decoder) -> tuple[HandRunner, list[dict[str, torch.Tensor]]]:
    runner = HandRunner(model, torch.float64)
    for name, ids in PROMPTS.items():
        runner.run({name: [*ids, 50]})
    return runner, [runner.run(chunks) for chunks in NEXT]


def test_a_chain_returns_the_inputs_of_tapped_layers(calls: list[bool], tmp_path: Path) -> None:
    model = load(write_tiny(tmp_path, "llama", num_hidden_layers=4), torch.float64)
    model.tap((0, 2, 3))
    batch = HandRunner(model, torch.float64)
    model.logits = lambda hidden: hidden  # type: ignore[method-assign]
    chain = CudaChain.of(list(model.layers), model.norm, model.taps)
    assert chain is not None
    model.implementations = (chain,)
    mine = batch.run({"a": PROMPTS["b"]})["a"]
    assert calls == [True]
    theirs = HandRunner(one_by_one(model), torch.float64).run({"a": PROMPTS["b"]})["a"]
    assert mine.shape[-1] == 4 * model.shape.hidden_size
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pattern", [["mamba", "mlp", "mamba"], ["attention", "mamba"]])
def test_gates_of_last_tokens_in_a_chain(pattern: list[str], calls: list[bool], tmp_path: Path) -> None:
    """The last layer, if it is Mamba-2, computes them of last tokens only."""
    changes = {"layers_block_type": pattern, "num_hidden_layers": len(pattern)}
    model = load(write_tiny(tmp_path, "nemotron_h", torch.float64, **changes), torch.float64)
    mine = HandRunner(chained(model), torch.float64).run_last(PROMPTS)
    assert calls == [True]
    theirs = HandRunner(one_by_one(model), torch.float64).run(PROMPTS)
    for name in PROMPTS:
        torch.testing.assert_close(mine[name], theirs[name][-1], rtol=1e-9, atol=1e-9)


def test_one_kernel_may_compute_the_products_from_one_attention_to_the_next(
    calls: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps of one row. Here it is plain torch, with float64 weights as a quantised matrix of scale 1."""
    rows: list[int] = []

    def multiply(
        x: torch.Tensor, residual: torch.Tensor, gemms: LayerGemms, activation: Activation, barrier: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(len(x))
        assert barrier is chain.barrier
        total = residual + x @ gemms.o.values.t()
        made = activation(rms_norm(total, gemms.feed_norm, gemms.feed_eps) @ gemms.gate_up.values.t())
        total = total + made @ gemms.down.values.t()
        normed = rms_norm(total, gemms.next_norm, gemms.next_eps)
        return normed if gemms.next_qkv is None else normed @ gemms.next_qkv.values.t(), total

    def as_matrix(linear: Linear) -> QuantizedMatrix:
        return QuantizedMatrix(linear.weight.matrix, torch.ones(linear.num_outputs, 1), None)

    monkeypatch.setattr(chains, "quantized_matrix", as_matrix)
    monkeypatch.setattr(chains, "joins_gemms", lambda x, gemms, activation: len(x) == 1)
    monkeypatch.setattr(chains, "multiply_layer", multiply)
    model = load(write_tiny(tmp_path, "llama", num_hidden_layers=4), torch.float64)
    model.tap((0, 2, 3))
    model.logits = lambda hidden: hidden  # type: ignore[method-assign]
    chain = CudaChain.of(list(model.layers), model.norm, model.taps)
    assert chain is not None and chain.barrier is None
    chain.barrier = torch.zeros(1, dtype=torch.int32)
    model.implementations = (chain,)
    runner = HandRunner(model, torch.float64)
    mine = [runner.run({"a": ids})["a"] for ids in ([5, 9, 33], [7])]
    assert calls == [True, True] and rows == [1] * 4  # of the second step, each after an attention
    runner = HandRunner(one_by_one(model), torch.float64)
    theirs = [runner.run({"a": ids})["a"] for ids in ([5, 9, 33], [7])]
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_the_last_product_of_many_tokens_adds_to_the_residual(calls: list[bool], tmp_path: Path) -> None:
    model, ids = load(write_tiny(tmp_path, "llama"), torch.float64), list(range(1, 41))
    mine = HandRunner(chained(model), torch.float64).run({"a": ids})["a"]
    assert calls == [True]
    theirs = HandRunner(one_by_one(model), torch.float64).run({"a": ids})["a"]
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_products_of_a_chain_have_the_adapters_of_their_tokens() -> None:
    linear = Linear(32, {"gate": 12, "up": 12}, True, Unquantized(torch.float64), torch.float64)
    torch.manual_seed(0)
    for parameter in linear.parameters():
        parameter.normal_()
    a, b = torch.randn(2, 32, 32, dtype=torch.float64), torch.randn(2, 24, 16, dtype=torch.float64)
    linear.lora = LoraWeights(a, b, ((0, 12, 0), (12, 24, 1)))
    order, tiles = make_tiles(np.array([1, -1, 0], np.int32), np.array([1, 2, 2], np.int32), 5, 2)
    lora = LoraTiles(torch.from_numpy(order), torch.from_numpy(tiles), 16)
    context: Any = SimpleNamespace(batch=SimpleNamespace(lora=lora))
    norm = RMSNorm(32, 1e-6, torch.float64)
    norm.weight.normal_()
    total = torch.randn(5, 32, dtype=torch.float64)
    found = linear(Unnormalized(total, norm.weight, norm.eps), context, silu_and_mul)
    torch.testing.assert_close(found, silu_and_mul(linear(norm(total)[0], context)), rtol=1e-9, atol=1e-9)
    linear.bias = None
    residual, x = torch.randn(5, 24, dtype=torch.float64), torch.randn(5, 32, dtype=torch.float64)
    expected = residual + linear(x, context)
    after = RMSNorm(24, 1e-6, torch.float64)
    found = add_product(linear.gemm(x, context, add=AddTo(residual, after.weight, after.eps, "library"))).total
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_products_that_multiply_with_a_too_have_the_adapters_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As products with A apart; `multiply_appended` is that of a GPU, in plain torch."""
    linear = Linear(32, {"gate": 12, "up": 12}, False, Unquantized(torch.float64), torch.float64)
    torch.manual_seed(0)
    linear.weight.data.normal_()
    a, b = torch.randn(2, 32, 32, dtype=torch.float64), torch.randn(2, 24, 16, dtype=torch.float64)
    runs = ((0, 12, 0), (12, 24, 1))
    linear.lora = LoraWeights(a, b, runs, torch.from_numpy(make_blocks(runs)))
    order, tiles = make_tiles(np.array([1, -1, 0], np.int32), np.array([1, 2, 2], np.int32), 5, 2)
    lora = LoraTiles(torch.from_numpy(order), torch.from_numpy(tiles), 16)
    context: Any = SimpleNamespace(batch=SimpleNamespace(lora=lora))
    norm, after = RMSNorm(32, 1e-6, torch.float64), RMSNorm(24, 1e-6, torch.float64)
    norm.weight.normal_()
    after.weight.normal_()
    total, x = torch.randn(5, 32, dtype=torch.float64), torch.randn(5, 32, dtype=torch.float64)
    residual = torch.randn(5, 24, dtype=torch.float64)
    gated = silu_and_mul(linear(norm(total)[0], context))
    plain = linear(norm(total)[0], context)
    added = residual + linear(x, context)
    calls = []

    def multiply(inputs: torch.Tensor | Unnormalized, weight: torch.Tensor, adapters: torch.Tensor) -> torch.Tensor:
        rows = inputs if isinstance(inputs, torch.Tensor) else norm(inputs.total)[0]
        calls.append(1)
        return rows @ torch.cat([weight, *adapters]).t()

    monkeypatch.setitem(TABLE["CPU"], "adapters", (GemmKernel("appended", lambda gemm: True, dispatch._append),))
    monkeypatch.setattr(dispatch, "multiply_appended", multiply)
    rows = Unnormalized(total, norm.weight, norm.eps, total * norm.weight, total.square().sum(1, keepdim=True))
    found = linear(rows, context, silu_and_mul)
    torch.testing.assert_close(found, gated, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(linear(rows, context), plain, rtol=1e-9, atol=1e-9)
    sums = add_product(linear.gemm(x, context, add=AddTo(residual, after.weight, after.eps, "streaming")))
    torch.testing.assert_close(sums.total, added, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sums.weighted, added * after.weight, rtol=1e-9, atol=1e-9)
    assert sums.squares is not None
    torch.testing.assert_close(sums.squares.sum(1).double(), added.square().sum(1), rtol=1e-5, atol=1e-5)
    assert len(calls) == 3


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_a_chain_equals_the_layers_one_by_one(family: str, calls: list[bool], tmp_path: Path) -> None:
    model = load(write_tiny(tmp_path, family), torch.float64)
    runner, found = steps(chained(model))
    assert calls == [True] * (len(PROMPTS) + len(NEXT))
    reference, expected = steps(one_by_one(model))
    assert len(calls) == len(PROMPTS) + len(NEXT)
    for mine, theirs in zip(found, expected, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(runner.caches, reference.caches, strict=True):  # garbage lies where it lay
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_the_second_product_of_a_chain_may_have_the_gate(
    calls: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FP8 weights that quantise their inputs have it."""
    model = load(write_tiny(tmp_path, "llama"), torch.float64)
    _, expected = steps(one_by_one(model))
    columns = []

    def add(gemm: Gemm) -> Unnormalized:
        if gemm.gate is not None:
            columns.append(gemm.x.shape[1])
        return add_product(gemm)

    monkeypatch.setattr(Linear, "takes_gate", lambda self, x, activation, context: activation is silu_and_mul)
    monkeypatch.setattr(chains, "add_product", add)
    _, found = steps(chained(model))
    num_gated = (len(model.layers) - 1) * len(calls)
    num_gated += sum(len(ids) >= MAX_STREAMING_ROWS_OF_LARGE_WEIGHT for ids in PROMPTS.values())  # the last layer's too
    assert all(calls) and columns == [2 * model.layers[0].mlp.down.num_inputs] * num_gated
    for mine, theirs in zip(found, expected, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-9)


def test_a_chain_ends_with_last_tokens_alone(calls: list[bool], tmp_path: Path) -> None:
    model = chained(load(write_tiny(tmp_path, "qwen3"), torch.float64))
    steps = [{"a": [5, 9, 33], "b": list(range(3, 40))}, {"c": [8], "b": [11], "a": [7, 8]}]
    rows: list[int] = []
    down: Any = model.layers[-1].mlp.down
    multiply = down.multiply
    down.multiply = lambda gemm: (rows.append(len(gemm.x)), multiply(gemm))[1]
    runner = HandRunner(model, torch.float64)
    found = [runner.run_last(chunks) for chunks in steps]
    assert calls == [True, True] and rows == [2, 3]
    reference = HandRunner(one_by_one(model), torch.float64)
    for mine, theirs in zip(found, [reference.run(chunks) for chunks in steps], strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name][-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_norms_after_run_one_by_one(family: str, calls: list[bool], tmp_path: Path) -> None:
    model = chained(load(write_tiny(tmp_path, family), torch.float64))
    assert not model.implementations
    steps(model)
    assert not any(calls)


def test_biases_and_other_weights_run_one_by_one(calls: list[bool], tmp_path: Path) -> None:
    biased = load(write_tiny(tmp_path / "biased", "llama", attention_bias=True, mlp_bias=True), torch.float64)
    steps(chained(biased))
    assert not any(calls) and not biased.implementations
    model = load(write_tiny(tmp_path / "plain", "llama"), torch.float64)
    assert chained(model).implementations
    model.layers[1].mlp.down.weight.__class__ = type(BatchInvariant(torch.float64).new_weight(1, 1))
    assert not chained(model).implementations


def test_nothing_is_chained_on_a_cpu(tmp_path: Path) -> None:
    x, weight = (torch.ones(rows, 64, dtype=torch.bfloat16) for rows in (100, 64))
    assert choose_chain(x, [weight]) == ""
    assert not load(write_tiny(tmp_path), torch.bfloat16).implementations


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [2, 3, 16, 33, 64, 65, 128, 256, 300, 1100])
def test_a_chain_on_the_gpu_is_as_close_as_the_layers_one_by_one(rows: int) -> None:
    torch.manual_seed(rows)
    exact, decoder = (make_decoder(dtype) for dtype in (torch.float32, torch.bfloat16))
    for mine, theirs in zip(exact.parameters(), decoder.parameters(), strict=True):
        theirs.copy_(mine.normal_(1.0 if mine.dim() == 1 else 0.0, 0.05).copy_(mine.bfloat16()))
    results = {}
    for name, model, implementations in (
        ("exact", exact, ()),
        ("chain", decoder, decoder.implementations),
        ("one by one", decoder, ()),
    ):
        model.implementations = implementations
        with torch.no_grad():
            results[name] = model(make_context(model, rows)).double()
    off = {name: (out - results["exact"]).norm() / results["exact"].norm() for name, out in results.items()}
    x = torch.ones(rows, 512, device="cuda", dtype=torch.bfloat16)
    chain = choose_chain(x, [decoder.layers[0].mlp.down.weight.data])
    assert chain or rows <= 64  # on Hopper all are
    assert off["chain"] < 1.3 * off["one by one"] < 0.05
    assert chain != "streaming" or not results["chain"].equal(results["one by one"])


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [5, 64, 100, 300])
def test_a_chain_on_the_gpu_with_adapters(rows: int) -> None:
    torch.manual_seed(rows)
    exact, decoder = (make_decoder(dtype) for dtype in (torch.float32, torch.bfloat16))
    for mine, theirs in zip(exact.parameters(), decoder.parameters(), strict=True):
        theirs.copy_(mine.normal_(1.0 if mine.dim() == 1 else 0.0, 0.05).copy_(mine.bfloat16()))
    slots = np.arange(rows, dtype=np.int32) % 4 - 1
    order, tiles = make_tiles(slots, np.ones(rows, np.int32), rows, 3)
    lora = LoraTiles(torch.from_numpy(order).cuda(), torch.from_numpy(tiles).cuda(), tile_size(rows))
    results = {}
    for name, model, implementations in (
        ("exact", exact, ()),
        ("chain", decoder, decoder.implementations),
        ("one by one", decoder, ()),
        ("without", decoder, decoder.implementations),
    ):
        model.implementations = implementations
        add_adapters(model)
        context = make_context(model, rows)
        if name != "without":
            context = replace(context, batch=replace(context.batch, lora=lora))
        with torch.no_grad():
            results[name] = model(context).double()
    off = {name: (out - results["exact"]).norm() / results["exact"].norm() for name, out in results.items()}
    assert off["chain"] < 1.3 * off["one by one"] < 0.05
    assert off["without"] > 0.2, "the adapters change nothing"
    x = torch.ones(rows, 512, device="cuda", dtype=torch.bfloat16)
    if choose_chain(x, [decoder.layers[0].mlp.down.weight.data]) == "streaming":
        assert not results["chain"].equal(results["one by one"])
        plain = torch.from_numpy(slots < 0).cuda()
        difference = (results["chain"] - results["without"])[plain]
        assert difference.norm() < 0.02 * results["without"][plain].norm()


def add_adapters(model: Decoder) -> None:
    """Three adapters of rank 16 of every product of the layers, the same for models of any dtype."""
    generator = torch.Generator().manual_seed(3)
    for linear in (part for part in model.layers.modules() if isinstance(part, Linear)):
        ends = np.cumsum(list(linear.outputs.values())).tolist()
        runs = tuple((first, end, index) for index, (first, end) in enumerate(pairwise([0, *ends])))
        a = torch.randn(3, 16 * len(runs), linear.num_inputs, generator=generator).bfloat16() / 16
        b = torch.randn(3, linear.num_outputs, 16, generator=generator).bfloat16() / 16
        dtype = model.embedding.weight.data.dtype
        blocks = torch.from_numpy(make_blocks(runs)).cuda()
        arrived = torch.zeros(num_counters(a.shape[1], 3), dtype=torch.int32, device="cuda")
        linear.lora = LoraWeights(a.to("cuda", dtype), b.to("cuda", dtype), runs, blocks, arrived)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "counts", [[1, 1, 14], [1] * 20 + [40], [1, 1, 200], [1] * 250 + [60], [3, 700], [1, 2000], [1] * 100 + [1500, 0]]
)
def test_last_tokens_alone_on_the_gpu(counts: list[int]) -> None:
    """By whichever chain the step goes, or by none."""
    torch.manual_seed(len(counts))
    decoder = make_decoder(torch.bfloat16)
    for parameter in decoder.parameters():
        parameter.copy_(parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.05))
    with torch.no_grad():
        everything = decoder(make_chunks(decoder, counts, only_last=False))
        last = decoder(make_chunks(decoder, counts, only_last=True))
    places = torch.tensor(counts, device="cuda").cumsum(0) - 1
    wanted = everything[places]
    assert last.shape == wanted.shape
    real = torch.tensor([count > 0 for count in counts], device="cuda")
    assert (last - wanted)[real].norm() < 0.02 * wanted[real].norm()
    assert last.isfinite().all()


def make_chunks(decoder: Decoder, counts: list[int], *, only_last: bool) -> ForwardContext:
    """Rows of so many tokens, from position 0 on; a row of none has no pages."""
    from slipstream.nn.paged_attention import TritonAttention

    width = 160
    dtype = decoder.embedding.weight.data.dtype
    num_rows, total = len(counts), sum(counts)
    pages = torch.arange(num_rows * width, device="cuda").view(num_rows, width) + 1
    pages[torch.tensor(counts) == 0] = 0
    row = torch.repeat_interleave(torch.arange(num_rows), torch.tensor(counts)).cuda()
    starts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device="cuda")
    positions = torch.arange(total, device="cuda") - starts[row]
    caches = [
        tuple(torch.zeros(num_rows * width + 1, 16, 2, 128, device="cuda", dtype=dtype) for _ in range(2))
        for _ in decoder.layers
    ]
    batch = BatchView(
        ids=torch.arange(total, device="cuda") % 61,
        positions=positions % 512,  # as far as the rope goes
        lengths=torch.tensor(counts, device="cuda"),
        slots=(pages[row, positions // 16] * 16 + positions % 16,),
        page_tables=(pages,),
        num_tokens=np.array(counts, np.int32),
        max_lengths=np.full(num_rows, width * 16, np.int32),
        num_single=0,
        query_starts=starts,
    )
    attention = TritonAttention(one_group(2, 128, num_heads=6, dtype=dtype), dtype)
    return ForwardContext(batch, attention, attention.make_metadata(batch), caches, (0,) * 4, only_last)


def make_decoder(dtype: torch.dtype) -> Decoder:
    norm = NormShape(eps=1e-6)
    attention = AttentionShape(
        num_heads=6, num_kv_heads=2, head_dim=128, scale=128**-0.5, qk_norm="heads", qkv_bias=True
    )
    layer = LayerShape(mixers=(attention,), feed=MlpShape(size=1032, activation="silu"), norm=norm)
    shape = DecoderShape(
        vocab_size=64,
        hidden_size=512,
        layers=(layer,) * 4,
        ropes=(RopeShape(RopeInfo(), 128),),
        norm=norm,
        max_positions=512,
        tied=True,
    )
    decoder = Decoder(shape, 512, dtype, lambda name: Unquantized(dtype))
    decoder.materialize(torch.device("cuda"))
    return decoder


def make_context(decoder: Decoder, rows: int) -> ForwardContext:
    """Rows of a token, each after 20 others."""
    from slipstream.nn.paged_attention import TritonAttention

    generator = torch.Generator("cuda").manual_seed(0)
    dtype = decoder.embedding.weight.data.dtype
    pages = (torch.arange(2 * rows, device="cuda") + 1).view(rows, 2)
    caches = []
    for _ in decoder.layers:
        made = torch.randn(2, 2 * rows + 1, 16, 2, 128, device="cuda", generator=generator).bfloat16().to(dtype)
        caches.append((made[0], made[1]))
    lengths = torch.full((rows,), 21, device="cuda")
    batch = BatchView(
        ids=torch.arange(rows, device="cuda") % 64,
        positions=lengths - 1,
        lengths=lengths,
        slots=(pages[:, 1] * 16 + 4,),
        page_tables=(pages,),
        num_tokens=np.ones(rows, np.int32),
        max_lengths=np.full(rows, 21, np.int32),
        num_single=rows,
    )
    attention = TritonAttention(one_group(2, 128, num_heads=6, dtype=dtype), dtype)
    return ForwardContext(batch, attention, attention.make_metadata(batch), caches, (0,) * 4)
