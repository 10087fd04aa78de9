"""Drafts of quantised checkpoints (MTP layers, heads): proposals are those of the same weights in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draft_spy import DraftSpy
from law7 import PAIRED, PROMPTS
from law7_engine import GREEDY, MAX_LEN, assert_same, make
from plain_mtp import PlainMtp
from quantized_checkpoint import quantize
from rank_threads import run_ranks_as_threads
from repeats import slow
from slipstream import LLM, SamplingParams
from slipstream.base.errors import BadCheckpoint
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build
from slipstream.nn import load as loading
from slipstream.nn.weights.quantized_weight import DequantizedWeight, QuantizedWeight
from slipstream.nn.weights.weight_format import UnquantizedWeight
from slipstream.runner.model_drafter import BlockDrafter, HeadDrafter
from tiny import write_weights
from tiny_drafters import write_dflash, write_eagle, write_eagle3, write_few, write_mtp

SPEC = {"method": "mtp", "num_speculative_tokens": 3}
PARAMS = [SamplingParams(temperature=0.8 * (row % 2), seed=row, max_tokens=16, ignore_eos=True) for row in range(6)]
# sizes that divide into groups of 32
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": dict(
        kv_lora_rank=64, q_lora_rank=64, v_head_dim=16, moe_intermediate_size=64, intermediate_size=128
    ),
    "glm4_moe": dict(moe_intermediate_size=64, intermediate_size=128),
    "qwen3_next": dict(
        moe_intermediate_size=64, shared_expert_intermediate_size=64, head_dim=32, linear_value_head_dim=16
    ),
    "qwen3_5": dict(intermediate_size=128, head_dim=32, linear_value_head_dim=16),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    family: str
    method: str
    skip: str = "no such module"  # what is not quantised, by a part of the tensors' names
    quantized: tuple[str, ...] = ()  # products of the MTP layer that are
    plain: tuple[str, ...] = ()

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The quantised checkpoint, and one of the weights that it means, in float64."""
        paths = [write_mtp(folder / name, self.family, **SIZES[self.family]) for name in ("quantised", "plain")]
        separate_experts(paths[0])
        write_weights(paths[1], quantize(paths[0], self.method, self.skip))
        return paths[0], paths[1]


def separate_experts(folder: Path) -> None:
    """As checkpoints of the hub have them: a tensor for each expert."""
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        root, found, part = name.rpartition(".experts.")
        if found and part in ("gate_up_proj", "down_proj"):
            names = ["gate_proj", "up_proj"] if part.startswith("gate") else [part]
            for expert, matrix in enumerate(tensor):
                for own, one in zip(names, matrix.chunk(len(names)), strict=True):
                    weights[f"{root}.experts.{expert}.{own}.weight"] = one.clone()
        else:
            weights[name] = tensor
    write_weights(folder, weights)


EXPERTS, DENSE = ("layers.0.mlp.gate_up", "layers.0.mlp.shared.down"), ("layers.0.mlp.gate_up", "layers.0.mlp.down")
ATTENTION = ("layers.0.attention.qkv", "layers.0.attention.output")
LATENT = ("layers.0.attention.first", "layers.0.attention.output")
CASES = {
    "DeepSeek-V3": Case("deepseek_v3", "fp8 block", "eh_proj", LATENT + EXPERTS, ("projection",)),
    "GLM-4.5": Case("glm4_moe", "fp8 channel", quantized=("projection", *ATTENTION, *EXPERTS)),
    "Qwen3-Next": Case("qwen3_next", "fp8 block", quantized=ATTENTION + EXPERTS, plain=("projection",)),
    "Qwen3-Next, plain delta nets": Case("qwen3_next", "fp8 block", "linear_attn", ATTENTION + EXPERTS),
    "AWQ, plain MTP layer": Case("qwen3_next", "awq", "mtp.", plain=("projection", *ATTENTION, *EXPERTS)),
    "compressed-tensors, plain MTP layer": Case("deepseek_v3", "w4a16", "model.layers.3.", plain=LATENT + EXPERTS),
    "GPTQ, a plain part": Case("qwen3_5", "gptq 8 sym", "mtp.layers.0.self_attn.k_proj", DENSE, ATTENTION[:1]),
}  # fmt: skip


@pytest.fixture(params=["dequantised", "quantised"])
def storage(request, monkeypatch):
    """quantised: in the form that a GPU has, multiplied by the reference."""
    if request.param == "quantised":
        stay_quantized(monkeypatch)
    return request.param


def stay_quantized(monkeypatch):
    monkeypatch.setattr(loading, "supports_kernels", lambda *args: True)


def open_llm(model, **options):
    llm = make(str(model), speculative_config=SPEC, **options)
    llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
    return llm


@pytest.mark.parametrize(
    "name", [slow(name) if name in ("GLM-4.5", "Qwen3-Next, plain delta nets") else name for name in CASES]
)
def test_proposals_are_those_of_the_weights_that_are_meant(name, tmp_path, monkeypatch):
    """After chunks, prefix hits, preemption and partly accepted drafts; tokens are those without drafts."""
    stay_quantized(monkeypatch)
    case = CASES[name]
    model, plain = case.write(tmp_path)
    reference = PlainMtp(plain)
    with make(str(model)) as without, open_llm(model, **PAIRED[0]) as llm:
        weights = dict(llm.core.executor.find(HeadDrafter | BlockDrafter).model.named_modules())
        for product in case.quantized + case.plain:
            weight = getattr(weights.get(product), "weight", weights.get(product))
            assert isinstance(weight, QuantizedWeight) == (product in case.quantized), product
        spy = DraftSpy(llm)
        assert_same(llm.generate(PROMPTS, PARAMS), without.generate(PROMPTS, PARAMS))
        counts = llm.core.scheduler.drafts.counts
        assert 0 < counts.num_accepted < counts.num_drafts
    spy.check(reference, at_least=50, stride=7)


@pytest.mark.every_second("name", "storage")
@pytest.mark.parametrize("name", ["DeepSeek-V3", "GPTQ, a plain part", "AWQ, plain MTP layer"])
def test_memory_of_the_layer_is_planned_to_the_byte(name, storage, tmp_path):
    model, _ = CASES[name].write(tmp_path)
    with open_llm(model) as llm:
        options = dict(model=str(model), speculative_config=SPEC, dtype="float64", num_pages=40, max_num_seqs=5)
        _, memory = estimate_build(make_options(**options, max_model_len=llm.config.scheduler.max_model_len))
        runner = llm.core.executor
        models = [runner.model, runner.find(HeadDrafter | BlockDrafter).model]
        assert memory.weights == sum(t.nbytes for model in models for t in (*model.parameters(), *model.buffers()))
        kinds = {type(module) for module in runner.find(HeadDrafter | BlockDrafter).model.modules()}
        if name == "DeepSeek-V3":
            assert (QuantizedWeight in kinds) == (storage == "quantised") and DequantizedWeight in kinds


def test_checkpoints_without_the_layer_are_refused_at_the_start(tmp_path):
    """Without drafts they run."""
    model, _ = CASES["AWQ, plain MTP layer"].write(tmp_path)
    weights = load_file(model / "model.safetensors")
    write_weights(model, {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")})
    with pytest.raises(BadCheckpoint, match=r"quantised has no tensor of its MTP layer \(mtp\.\*\), .* choose another"):
        estimate_build(make_options(model=str(model), speculative_config=SPEC))
    with make(str(model)) as llm:
        llm.generate(PROMPTS[:1], GREEDY)


def test_copies_of_the_projection_to_tokens_may_be_quantised(tmp_path):
    """They are those of the model, and not read."""
    model, _ = CASES["compressed-tensors, plain MTP layer"].write(tmp_path)
    weights = load_file(model / "model.safetensors")
    for kind, like in (("weight_packed", torch.int32), ("weight_scale", torch.float16)):
        weights[f"model.layers.3.shared_head.head.{kind}"] = torch.zeros(304, 8, dtype=like)
    write_weights(model, weights)
    with make(str(model)) as without, open_llm(model) as llm:
        assert_same(llm.generate(PROMPTS, GREEDY), without.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("name", ["DeepSeek-V3", slow("Qwen3-Next")])
def test_the_layer_is_divided_between_ranks(name, tmp_path, monkeypatch):
    """Tokens are those without drafts, and as many drafts are right as on one rank."""
    stay_quantized(monkeypatch)
    run_ranks_as_threads(monkeypatch)
    model, _ = CASES[name].write(tmp_path)
    counts = []
    with make(str(model)) as without:
        wanted = without.generate(PROMPTS, GREEDY)
    for num_ranks in (1, 2):
        with open_llm(model, tensor_parallel_size=num_ranks) as llm:
            assert_same(llm.generate(PROMPTS, GREEDY), wanted)
            found = llm.core.scheduler.drafts.counts
            counts.append((found.num_accepted, found.num_drafts))
    assert counts[0] == counts[1] and counts[0][0] > 0


def test_weights_that_are_quantised_at_load(storage, tmp_path):
    """As those of the model: the layer, and not the projection of both inputs."""
    model = str(write_mtp(tmp_path, "glm4_moe"))
    options = dict(quantization="fp8", dtype="float64", num_pages=40, max_num_seqs=5, max_model_len=MAX_LEN)
    shared = dict(model=model, use_tqdm_on_load=False, **options)
    with LLM(**shared) as without, LLM(**shared, speculative_config=SPEC) as llm:
        llm.core.scheduler.drafts.length = None
        assert_same(llm.generate(PROMPTS, GREEDY), without.generate(PROMPTS, GREEDY))
        runner = llm.core.executor
        head = runner.find(HeadDrafter | BlockDrafter).model
        kind = QuantizedWeight if storage == "quantised" else DequantizedWeight
        assert type(head.layers[0].attention.qkv.weight) is type(head.layers[0].mlp.gate_up) is kind
        assert type(head.projection.weight) is UnquantizedWeight
        _, memory = estimate_build(make_options(model=model, speculative_config=SPEC, **options))
        tensors = [t for part in (runner.model, head) for t in (*part.parameters(), *part.buffers())]
        assert memory.weights == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.every_second("method", "storage")
@pytest.mark.parametrize(("method", "write"), [("eagle", write_eagle), ("eagle3", write_eagle3)])
def test_plain_heads_draft_for_quantised_models(method, write, storage, tmp_path):
    """With the model's embedding and, for `eagle`, its quantised projection to tokens."""
    model, plain = (write_few(tmp_path / name, intermediate_size=128) for name in ("model", "plain"))
    meant = quantize(model, "fp8 channel", head=True)
    write_weights(plain, meant)
    found = []
    for folder in (model, plain):
        spec = {"method": method, "model": str(write(tmp_path / "head", plain)), "num_speculative_tokens": 3}
        with make(str(folder), speculative_config=spec) as llm:
            llm.core.scheduler.drafts.length = None
            spy = DraftSpy(llm)
            found.append((llm.generate(PROMPTS, GREEDY), spy.proposals))
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.every_second("method", "storage")
@pytest.mark.parametrize(
    ("write", "method"),
    [(write_eagle, "w4a16"), (write_eagle3, "fp8 channel"), (write_dflash, "gptq 4"), (write_eagle3, "plain")],
)
def test_quantised_heads(write, method, storage, tmp_path):
    """plain: the config says that the weights are quantised, and none is."""
    model = write_few(tmp_path / "model")
    heads = [write(tmp_path / name, model, intermediate_size=96) for name in ("quantised", "plain")]
    if method == "plain":
        quantize(heads[0], "awq", skip="")
    else:
        write_weights(heads[1], quantize(heads[0], method, head=write is write_eagle3))
    name, found = write.__name__.removeprefix("write_"), []
    for head in heads:
        with make(str(model), speculative_config={"method": name, "model": str(head)}) as llm:
            llm.core.scheduler.drafts.length = None
            spy = DraftSpy(llm)
            found.append((llm.generate(PROMPTS, GREEDY), spy.proposals))
            is_kept = any(
                isinstance(module, QuantizedWeight)
                for module in llm.core.executor.find(HeadDrafter | BlockDrafter).model.modules()
            )
            assert is_kept == (storage == "quantised" and method != "plain" and head is heads[0])
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
