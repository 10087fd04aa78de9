"""No launcher reads a value: each is run with its kernels replaced, those that only CUDA reaches too."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
for module in (
    "gemm.linear.streaming_hopper",
    "gemm.linear.gated_gemm_hopper",
    "gemm.moe.gemm_hopper",
    "gemm.moe.streaming_hopper",
    "gemm.quantized.streaming",
    "recurrent.ssm_hopper",
):
    module = f"slipstream.ops.{module}"
    pytest.importorskip(module, reason="a triton without Gluon")

from nets.host_reads import HostRead, no_host_reads, replace_kernels  # noqa: E402
from nets.launch_inputs import ROWS, get, half, ints  # noqa: E402
from nets.launched_attention import attend_on_hopper, attend_single_on_hopper, attention  # noqa: E402
from nets.launched_states import delta_rule, drafted_states, state_space  # noqa: E402
from slipstream.ops.elementwise import KeptTokens, StepRows  # noqa: E402
from slipstream.ops.gemm.description import AddTo, Gemm, NormBefore  # noqa: E402
from slipstream.ops.gemm.linear.triton import Norm  # noqa: E402
from slipstream.ops.gemm.lora.reference import LoraTiles, LoraWeights  # noqa: E402
from slipstream.ops.gemm.moe import ExpertBiases, RouterRule, Routing, SharedMatrices  # noqa: E402
from slipstream.ops.gemm.quantized import QuantizedExperts, QuantizedMatrix, words_of  # noqa: E402
from slipstream.ops.sampling import Accepted, DrawnTokens, MatchRule, RowHistory  # noqa: E402
from slipstream.ops.sampling.reference import DrawTables, Penalty, TokenMask  # noqa: E402
from slipstream.params.sampling import SamplingParams  # noqa: E402
from slipstream.runner.sampling.draw import limits_of  # noqa: E402

VOCAB = 300


def penalty() -> Penalty:
    counts = ints(2, VOCAB).int()
    return Penalty(counts, counts.to(torch.uint8), torch.tensor([0, -1, 1]), torch.rand(ROWS, 3))


def adapters() -> dict[str, Callable[[], Any]]:
    weights = LoraWeights(half(2, 4, 16), half(2, 24, 4), ((0, 24, 0),), torch.tensor([[0, 24, 0]], dtype=torch.int32))
    tiles = LoraTiles(ints(3).int(), torch.zeros(1, 3, dtype=torch.int32), 16)
    return {
        "shrink_lora": lambda: get("gemm.lora.triton.shrink_lora")(half(3, 16), weights, tiles),
        "expand_lora": lambda: get("gemm.lora.triton.expand_lora")(half(3, 24), half(3, 4), weights, tiles),
        "add_lora_embedding": lambda: get("gemm.lora.triton.add_lora_embedding")(
            half(3, 24), ints(3), weights, tiles, 1.0
        ),
        "finish_lora": lambda: get("gemm.lora.after_gemm.finish_lora")(half(3, 28), weights, tiles),
    }


def quantized() -> dict[str, Callable[[], Any]]:
    matrix = QuantizedMatrix(half(32, 64).to(torch.float8_e4m3fn), torch.rand(32, 2), None)
    rows = QuantizedMatrix(half(64, 512).to(torch.float8_e4m3fn), torch.rand(64, 1), None)
    wide = QuantizedMatrix(half(64, 2048).to(torch.float8_e4m3fn), torch.rand(64, 1), None)
    tile, row_tile = get("gemm.quantized.streaming.SliceTile")(2), get("gemm.quantized.row.RowTile")(2)
    scales = get("gemm.linear.streaming_hopper.Scales")(rows.scale, torch.rand(ROWS, 1))

    def row_chain() -> None:
        values, scale = torch.zeros(256, 256, dtype=torch.uint8), torch.rand(256, 4)
        weight = QuantizedMatrix(values, scale, None, 8, words=words_of(scale, 8))
        add = AddTo(half(1, 256), half(256), 1e-6, "streaming")
        sums = get("gemm.table.add_product")(Gemm(half(1, 512), weight, add=add))
        few = scale[:, :2].contiguous()
        narrow = weight._replace(values=values[:, :128].contiguous(), scale=few, words=words_of(few, 8))
        get("gemm.quantized.streaming.streaming_gemm_low_bit")(sums, narrow, None, "silu")
        get("gemm.quantized.streaming.streaming_gemm_low_bit")(half(1, 512), weight, half(256), "", row_tile)

    def fp8_chain() -> None:
        add = AddTo(half(1, 64), half(64), 1e-6, "streaming")
        sums = get("gemm.table.add_product")(Gemm(half(1, 512), rows._replace(quantizes_inputs=True), add=add))
        weight = matrix._replace(scale=torch.rand(32, 1), quantizes_inputs=True)
        get("gemm.table.multiply")(Gemm(sums, weight))
        get("gemm.quantized.dispatch._add_fp8_parts")(
            Gemm(half(3, 2048), wide, add=add._replace(residual=half(3, 64), chain="library"))
        )

    def joined() -> None:
        shapes = (64, 1024), (128, 64), (64, 1024), (64, 64)
        weights = [
            QuantizedMatrix(half(*shape).to(torch.float8_e4m3fn), torch.rand(shape[0], 1), None) for shape in shapes
        ]
        layer = get("gemm.quantized.matrix.LayerGemms")(*weights, half(64), 1e-6, half(64), 1e-6)
        for gemms in (layer, layer._replace(next_qkv=None)):
            get("gemm.quantized.layer_kernel.launch_layer")(half(1, 1024), half(1, 64), gemms, "silu", ints(1))

    return {
        "GEMMs between attentions": joined,
        "streamed quantised GEMM": lambda: get("gemm.quantized.streaming.streaming_gemm_low_bit")(
            half(ROWS, 512), rows, half(64)
        ),
        "streamed quantised GEMM split": lambda: get("gemm.quantized.streaming.streaming_gemm_low_bit")(
            half(ROWS, 512), rows, None, "silu", tile
        ),
        "streamed quantised GEMM added": lambda: get("gemm.quantized.streaming.streaming_gemm_low_bit_add")(
            half(ROWS, 512), rows, half(ROWS, 64), half(64), 1e-6
        ),
        "streamed FP8 GEMM": lambda: get("gemm.linear.streaming_hopper.streaming_gemm")(
            rows.values[:ROWS], rows.values, None, "silu", scales=scales
        ),
        "4-bit chain of a row": row_chain,
        "FP8 chain": fp8_chain,
        "quantised GEMM": lambda: get("gemm.quantized.gemm.quantized_gemm")(half(ROWS, 64), matrix),
        "dequantised weight": lambda: get("gemm.quantized.expand.dequantize")(matrix, torch.bfloat16),
        "gated rows to FP8": lambda: get("gemm.quantized.gemm.quantize_gated_rows")(half(ROWS, 64), "silu"),
        "normed rows to FP8": lambda: get("gemm.quantized.gemm.quantize_normed_rows")(
            half(ROWS, 64), half(ROWS, 64), half(64), 1e-6
        ),
        "rows to FP8": lambda: get("gemm.quantized.gemm.quantize_rows")(half(ROWS, 64)),
    }


def sampling() -> dict[str, Callable[[], Any]]:
    logits, keys, entries = half(ROWS, VOCAB), ints(ROWS), torch.tensor([0, -1, 1])
    limits = torch.tensor([limits_of(SamplingParams(min_p=0.3, top_k=5, top_p=0.9), VOCAB)]).repeat(ROWS, 1)
    warm, random = torch.rand(ROWS), torch.tensor([True, False, True])
    counts, seen, _, values, _ = penalty()
    after = penalty()._replace(earlier=ints(ROWS, 4))
    mask = TokenMask(ints(2, VOCAB // 32 + 1).int(), entries.int(), ints(ROWS))
    rows, tables = torch.arange(ROWS), DrawTables(keys, random, warm, None)
    limited = tables._replace(limits=limits)
    at = "sampling."
    return {
        "argmax_rows": lambda: get(at + "choose.argmax_rows")(logits, penalty()),
        "draw_by_row": lambda: get(at + "choose.draw_by_row")(logits, rows, keys, tables, penalty()),
        "draw_by_row with limits": lambda: get(at + "choose.draw_by_row")(logits, rows, keys, limited, penalty()),
        "draw_by_row after drafts": lambda: get(at + "choose.draw_by_row")(logits, rows, keys, limited, after),
        "masked argmax_rows": lambda: get(at + "choose.argmax_rows")(logits, penalty(), mask),
        "masked draw_by_row": lambda: get(at + "choose.draw_by_row")(logits, rows, keys, tables, None, mask),
        "fetch_masks_": lambda: get(at + "edit.fetch_masks_")(
            ints(4, 8).int(), ints(2, 8).int(), ints(2).int(), ints(5).int(), ints(5).int()
        ),
        "plain draw_by_row": lambda: get(at + "choose.draw_by_row")(
            logits, rows, keys, tables._replace(temperatures=None)
        ),
        "find_floor": lambda: get(at + "floor.find_floor")(logits, limits, (), warm, penalty()),
        "penalize_": lambda: get(at + "edit.penalize_")(logits, counts, seen, entries, values),
        "count_": lambda: get(at + "edit.count_")(counts, seen, entries, keys),
        "add_entries_": lambda: get(at + "edit.add_entries_")(logits, None, torch.rand(2, VOCAB), entries),
        "add_entries_ to some rows": lambda: get(at + "edit.add_entries_")(logits, keys, torch.rand(2, VOCAB), keys),
        "mask_bits_": lambda: get(at + "edit.mask_bits_")(logits, ints(2, VOCAB // 32 + 1).int(), entries),
        "forbid_": lambda: get(at + "edit.forbid_")(logits, None, ints(ROWS, 2), random),
        "forbid_matched_": lambda: get(at + "edit.forbid_matched_")(logits, keys, ints(ROWS, 2), ints(ROWS, 2) > 1),
        "drop_below_": lambda: get(at + "edit.drop_below_")(logits, warm),
        "top_logprobs": lambda: get(at + "triton.top_logprobs")(logits, keys, 5),
        "top_logprobs of many": lambda: get(at + "triton.top_logprobs")(logits, keys, 40),
        "logprobs_of": lambda: get(at + "triton.logprobs_of")(logits, ints(ROWS, 2)),
        "noise_bits": lambda: get(at + "floor.noise_bits")(keys, 50),
        "step_keys": lambda: get(at + "floor.step_keys")(keys, keys, 0),
    }


def rows_and_norms() -> dict[str, Callable[[], Any]]:
    x, weight, bias, wide = half(ROWS, 64), half(64), half(64), half(ROWS, 128)
    heads, rotary, slots = half(ROWS, 6, 16), torch.rand(ROWS, 2, 8), ints(ROWS, most=16)
    head_weight, cache = half(4, 16), half(2, 16, 2, 16)
    rows, tables = ints(ROWS), ints(1, 5, 4)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    chunks = ints(5), torch.tensor([0, 0, 1, 2, 2]), ints(5), ints(5)
    return {
        "rms_norm": lambda: get("elementwise.norm_triton.rms_norm")(x, weight, 1e-6),
        "rms_norm of heads": lambda: get("elementwise.norm_triton.rms_norm")(heads[:, :4], head_weight, 1e-6),
        "rms_norm of columns": lambda: get("elementwise.norm_triton.rms_norm")(half(64, ROWS).t(), weight, 1e-6),
        "add_rms_norm": lambda: get("elementwise.norm_triton.add_rms_norm")(x, x, weight, 1e-6),
        "layer_norm": lambda: get("elementwise.norm_triton.layer_norm")(x, weight, bias, 1e-6),
        "layer_norm_of_sum": lambda: get("elementwise.norm_triton.layer_norm_of_sum")(x, x, weight, bias, 1e-6),
        "add_layer_norm": lambda: get("elementwise.norm_triton.add_layer_norm")(x, x, weight, None, 1e-6),
        "silu_and_mul": lambda: get("elementwise.triton.silu_and_mul")(wide),
        "gelu_tanh_and_mul": lambda: get("elementwise.triton.gelu_tanh_and_mul")(wide),
        "sparse_gelu_tanh_and_mul": lambda: get("elementwise.triton.sparse_gelu_tanh_and_mul")(wide, 1.5),
        "relu2": lambda: get("elementwise.triton.relu2")(wide),
        "sigmoid_gate_": lambda: get("elementwise.triton.sigmoid_gate_")(wide.clone(), wide),
        "gelu_and_mul": lambda: get("elementwise.triton.gelu_and_mul")(wide),
        "lookup_embedding_and_rope": lambda: get("elementwise.triton.lookup_embedding_and_rope")(
            half(9, 64), rows, 2.0, torch.rand(9, 2, 8), rows
        ),
        "norm_rope": lambda: get("attention.rope_triton.norm_rope")(heads[:, :4], head_weight, 1e-6, rotary),
        "rope_and_write_cache": lambda: get("attention.rope_triton.rope_and_write_cache")(
            heads[:, :4], heads[:, 4:], head_weight, 1e-6, rotary, cache, cache, slots
        ),
        "gather_inputs": lambda: get("elementwise.step_inputs_triton.gather_inputs")(
            ints(5), ints(5, 1), tables, 4, 4, StepRows(rows)
        ),
        "gather_inputs and advance": lambda: get("elementwise.step_inputs_triton.gather_inputs")(
            ints(5), ints(5, 1), tables, 4, 4, StepRows(rows), advance=True
        ),
        "gather_inputs of chunks": lambda: get("elementwise.step_inputs_triton.gather_inputs")(
            ints(5), ints(5, 3), tables, 4, 4, StepRows(rows, *chunks)
        ),
        "gather_inputs and keep them": lambda: get("elementwise.step_inputs_triton.gather_inputs")(
            ints(5), ints(5, 1), tables, 4, 4, StepRows(rows), kept=KeptTokens(ints(4, 4).int(), 0, 0)
        ),
        **delta_rule(),
        **state_space(),
        "list_chunks": lambda: get("recurrent.steps_triton.list_chunks")(starts, starts[1:], ints(2, 3).int(), 5),
        "segment_sum": lambda: get("elementwise.triton.segment_sum")(x, starts),
        "segment_max_into": lambda: get("elementwise.triton.segment_max_into")(torch.rand(2, 64), x, starts, 0),
        "segment_add_into": lambda: get("elementwise.triton.segment_add_into")(torch.rand(2, 64), x, starts, 0),
    }


def drafts() -> dict[str, Callable[[], Any]]:
    drawn = DrawnTokens(ints(4), torch.tensor([0, 1, 0, 0]), ints(4), ints(4), ints(4) > 1)
    history = RowHistory(ints(5, 4), ints(5), ints(5, 3), ints(9, 4).int())
    out = Accepted(ints(4), *(torch.zeros(4, dtype=torch.bool) for _ in range(2)))
    return {
        "accept_": lambda: get("sampling.drafts_triton.accept_")(ints(5, 4), ints(5), drawn),
        "accept_ in place": lambda: get("sampling.drafts_triton.accept_")(ints(5, 4), ints(5), drawn, out),
        "store_drawn_": lambda: get("sampling.drafts_triton.store_drawn_")(ints(5, 4), ints(4), ints(4), out.failed),
        "store_drawn_ in place": lambda: get("sampling.drafts_triton.store_drawn_")(
            ints(5, 4), ints(4), ints(4), out.failed, (out.tokens, out.kept)
        ),
        "propose_from_history_": lambda: get("sampling.drafts_triton.propose_from_history_")(
            ints(4), drawn.offsets, history, 3, MatchRule(2, 4, math.inf), 12
        ),
    }


def experts() -> dict[str, Callable[[], Any]]:
    routing = Routing(ints(3, 2).int(), torch.rand(3, 2))
    stacks = [
        QuantizedExperts(
            QuantizedMatrix(half(*shape).to(torch.float8_e4m3fn), torch.rand(shape[0], 1), None, quantizes_inputs=True),
            8,
        )
        for shape in ((8 * 96, 32), (8 * 32, 48))
    ]
    return {
        "route_copies": lambda: get("gemm.altup.triton.route_copies")(
            half(3, 4, 64)[:, 1], half(64), 1e-6, 0.1, half(4, 64), half(16, 4)
        ),
        "predict_copies": lambda: get("gemm.altup.triton.predict_copies")(half(3, 4, 64), half(3, 16)),
        "correct_copies": lambda: get("gemm.altup.triton.correct_copies")(half(3, 4, 64), half(3, 64), half(3, 4), 0),
        "route": lambda: get("gemm.moe.triton.route")(half(3, 8), RouterRule(2), None),
        "route without padding": lambda: get("gemm.moe.triton.route")(half(3, 8), RouterRule(2), None, ints(3), 16),
        "expert_mlp": lambda: get("gemm.moe.triton.expert_mlp")(half(3, 32), routing, half(8, 96, 32), half(8, 32, 48)),
        "expert_mlp of one token": lambda: get("gemm.moe.triton.expert_mlp")(
            half(1, 32), Routing(ints(1, 2).int(), torch.rand(1, 2)), half(8, 96, 32), half(8, 32, 48)
        ),
        "expert_mlp of one token by one wave of programs": lambda: get("gemm.moe.triton.expert_mlp")(
            half(1, 1040), Routing(ints(1, 2).int(), torch.rand(1, 2)), half(4, 16, 1040), half(4, 1040, 8)
        ),
        "expert_mlp of one token in float32": lambda: get("gemm.moe.triton.expert_mlp")(
            torch.randn(1, 32),
            Routing(ints(1, 2).int(), torch.rand(1, 2)),
            half(8, 96, 32).float(),
            half(8, 32, 48).float(),
        ),
        "expert_mlp of many tokens": lambda: get("gemm.moe.triton.expert_mlp")(
            half(2100, 32), Routing(ints(2100, 2).int(), torch.rand(2100, 2)), half(8, 96, 32), half(8, 32, 48)
        ),
        "expert_mlp by wgmma": lambda: get("gemm.moe.triton.expert_mlp")(
            half(600, 256), Routing(ints(600, 2).int(), torch.rand(600, 2)), half(4, 256, 256), half(4, 256, 128)
        ),
        "expert_mlp of few tokens by TMA": lambda: get("gemm.moe.triton.expert_mlp")(
            half(3, 128), routing, half(8, 256, 128), half(8, 128, 128)
        ),
        "expert_mlp with a shared expert": lambda: get("gemm.moe.triton.expert_mlp")(
            half(3, 32),
            routing,
            half(8, 96, 32),
            half(8, 32, 48),
            shared_matrices=SharedMatrices(half(96, 32), half(32, 48), half(1, 32)),
        ),
        "expert_mlp of quantised experts": lambda: get("gemm.moe.triton.expert_mlp")(half(3, 32), routing, *stacks),
        "expert_mlp with biases": lambda: get("gemm.moe.triton.expert_mlp")(
            half(3, 32), routing, half(8, 96, 32), half(8, 32, 48), False, ExpertBiases(half(8, 96), half(8, 32))
        ),
    }


def products() -> dict[str, Callable[[], Any]]:
    weight, bias, gated = half(64, 128), half(64), half(128, 128)
    norm = half(128)
    residual = half(2, 128)
    fp8 = QuantizedMatrix(half(64, 512).to(torch.float8_e4m3fn), torch.rand(64, 1), None, quantizes_inputs=True)

    def chained() -> None:
        x, first = half(16, 128), half(128, 128)
        add = AddTo(half(16, 128), norm, 1e-6, "streaming")
        sums = get("gemm.table.add_product")(Gemm(x, first, add=add))
        get("gemm.table.multiply")(Gemm(sums, gated, None, get("elementwise.silu_and_mul")))

    at = "gemm.linear."
    return {
        "gemv": lambda: get(at + "gemv.gemv")(half(2, 128), weight, bias),
        "gemv of a norm": lambda: get(at + "gemv.gemv")(
            half(2, 128), weight, bias, Norm(norm, 1e-6, residual, residual), "silu"
        ),
        "persistent_gemv": lambda: get(at + "gemv.persistent_gemv")(
            half(1, 128),
            weight,
            bias,
            Norm(norm, 1e-6, None, None),
            "",
            get(at + "gemv.PersistentTile")(4, 4, 2),
        ),
        "skinny_mma": lambda: get(at + "triton.skinny_mma")(half(9, 128), weight, bias, "silu"),
        "skinny_mma split": lambda: get(at + "triton.skinny_mma")(
            half(20, 4096), half(64, 4096), None, "", get(at + "triton.SkinnyTile")(16, 64, 3, 4, 2)
        ),
        "batch_invariant_linear": lambda: get(at + "triton.batch_invariant_linear")(half(9, 128), weight, bias),
        "streaming_gemm": lambda: get(at + "streaming_hopper.streaming_gemm")(half(16, 128), weight, bias, "silu"),
        "streaming_gemm split": lambda: get(at + "streaming_hopper.streaming_gemm")(
            half(16, 512), half(64, 512), None, "", get(at + "streaming_hopper.StreamingTile")(2)
        ),
        "streaming_gemm_parts": lambda: get(at + "streaming_hopper.streaming_gemm_parts")(
            half(70, 512), half(64, 512), get(at + "streaming_hopper.StreamingTile")(2)
        ),
        "a chain of products": chained,
        "gated_gemm": lambda: get(at + "gated_gemm_hopper.gated_gemm")(half(300, 128), gated, "silu"),
        "relu2_gemm": lambda: get(at + "gated_gemm_hopper.relu2_gemm")(half(300, 128), half(512, 128)),
        "gelu_gemm": lambda: get(at + "gated_gemm_hopper.gelu_gemm")(half(300, 128), half(512, 128), half(512)),
        "linear": lambda: get("gemm.linear.linear")(half(9, 128), weight, bias),
        "gated GEMM of many": lambda: get("gemm.table.multiply")(
            Gemm(half(2048, 128), gated, None, get("elementwise.silu_and_mul"))
        ),
        "GEMM of many with gelu": lambda: get("gemm.table.multiply")(
            Gemm(half(2048, 128), half(512, 128), half(512), torch.nn.functional.gelu)
        ),
        "GEMM of a norm": lambda: get("gemm.table.multiply_normed")(
            Gemm(half(2, 128), weight, bias, norm=NormBefore(norm, 1e-6, residual))
        ),
        "GEMM of a norm of more": lambda: get("gemm.table.multiply_normed")(
            Gemm(half(9, 128), weight, bias, norm=NormBefore(norm, 1e-6))
        ),
        "GEMM of FP8 inputs": lambda: get("gemm.table.multiply")(Gemm(half(9, 512), fp8)),
        "choose_chain": lambda: get("gemm.table.choose_chain")(half(9, 128), [weight, fp8]),
    }


@pytest.fixture
def kernels(monkeypatch):
    """All kernels and those launched. A device of some multiprocessors, on which the kernels for Hopper run."""
    found, launched = replace_kernels(monkeypatch)
    for module in ("gemm.linear.gated_gemm_hopper", "gemm.moe.gemm_hopper", "gemm.moe.streaming_hopper"):
        monkeypatch.setattr(f"slipstream.ops.{module}.multiprocessors", lambda device: 8)
    for module in ("gemm.linear.tiles", "gemm.moe.triton", "gemm.quantized.dispatch"):
        monkeypatch.setattr(f"slipstream.ops.{module}.has_hopper_kernels", lambda device: True)
    return found, launched


def launches(patch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    return (
        sampling()
        | rows_and_norms()
        | drafts()
        | drafted_states()
        | adapters()
        | quantized()
        | experts()
        | products()
        | attention(patch)
    )


@pytest.mark.parametrize("name", launches(pytest.MonkeyPatch()))
def test_a_launcher_reads_no_value(name, kernels, monkeypatch):
    _, launched = kernels
    with no_host_reads():
        launches(monkeypatch)[name]()
    assert launched or name == "choose_chain"


def test_every_kernel_is_launched_by_some_test_here(kernels, monkeypatch):
    found, launched = kernels
    with no_host_reads():
        for name, launch in launches(monkeypatch).items():
            if "Hopper" not in name:
                launch()
        for chunked in (False, True):
            for dtype in ("bfloat16", "fp8"):
                attend_on_hopper(monkeypatch, chunked, dtype)
        attend_single_on_hopper(monkeypatch)
    assert len(found) > 30 and not sorted(found - launched), sorted(found - launched)


PLANTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "bool": lambda x: bool(x.sum() > 0),
    "if": lambda x: 1 if x.any() else 2,
    "not": lambda x: not x.any(),
    "int": lambda x: int(x[0, 0]),
    "float": lambda x: float(x.max()),
    "item": lambda x: x.max().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "max of Python": lambda x: max(x[0]),
    "range": lambda x: range(x[0, 0].long()),
    "a size": lambda x: torch.empty(x[0, 0].long().abs()),
    "a slice": lambda x: x[: x[0, 0].long().abs()],
    "a mask": lambda x: x[x > 0],
    "format": lambda x: f"{x}",
    "where": lambda x: torch.where(x > 0),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_read_planted_into_a_launcher_is_caught(bug, kernels, monkeypatch):
    module = importlib.import_module("slipstream.ops.elementwise.norm_triton")
    launch = module._launch
    monkeypatch.setattr(module, "_launch", lambda x, *rest: (PLANTED[bug](x), launch(x, *rest)))
    with pytest.raises(HostRead), no_host_reads():
        get("elementwise.norm_triton.rms_norm")(torch.rand(ROWS, 64), torch.rand(64), 1e-6)
    assert not kernels[1]


def test_a_launch_with_other_arguments_than_the_kernels_is_caught(kernels):
    kernel = importlib.import_module("slipstream.ops.elementwise.triton")._sum_kernel
    full = (1, 2, 3, 4, 5, 6, 7)
    kernel[(1,)](*full, TOKENS=1, COLUMNS=1, num_warps=4)
    for args, words in ((full[:-1], {}), (full, {"more": 1}), (full, {"stride": 5})):
        with pytest.raises(AssertionError, match="_sum_kernel: "):
            kernel[(1,)](*args, TOKENS=1, COLUMNS=1, **words)
