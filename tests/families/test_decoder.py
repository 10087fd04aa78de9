"""Tiny models against transformers on the same weights: whole, chunked, and several rows at once."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from causal_oracle import oracle
from hand_batch import HandRunner
from hand_load import load
from slipstream.base.errors import UnsupportedModel
from slipstream.nn.layers.linear import Linear
from tiny import LLAMA3_ROPE, LONG_ROPE, write_tiny

YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mha": ("llama", {"num_key_value_heads": 4}),
    "gqa": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3 window": ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "mistral": ("mistral", {}),
    "mistral odd window": ("mistral", {"sliding_window": 11, "num_key_value_heads": 4}),
    "mistral window of one": ("mistral", {"sliding_window": 1}),
    "mistral full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "gemma2 uncapped": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3", {}),
    "gemma3 capped": ("gemma3", {"final_logit_softcapping": 5.0}),
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3", {"sliding_window": 9}),
    "phi4 mini": ("phi3", {"rope_parameters": LONG_ROPE, "tie_word_embeddings": True}),  # short enough for both
    "olmo2": ("olmo2", {}),
    # eps large enough to count: the usual ones change no result
    "llama large eps": ("llama", {"rms_norm_eps": 0.5}),
    "qwen3 large eps": ("qwen3", {"rms_norm_eps": 0.5}),
    "gemma3 large eps": ("gemma3", {"rms_norm_eps": 0.5}),
    "olmo2 large eps": ("olmo2", {"rms_norm_eps": 0.5}),
    "mixtral": ("mixtral", {}),
    "mixtral window": ("mixtral", {"sliding_window": 9}),
    "qwen2 moe": ("qwen2_moe", {}),
    "qwen2 moe normalised": ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen2 moe without biases": ("qwen2_moe", {"qkv_bias": False}),
    "qwen3 moe": ("qwen3_moe", {}),
    "qwen3 moe every second": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": False}),
    "olmoe": ("olmoe", {}),
    "glm4 moe": ("glm4_moe", {}),
    "glm4 moe groups": ("glm4_moe", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "use_qk_norm": False}),
    "gpt oss": ("gpt_oss", {}),
    "gpt oss other layers": ("gpt_oss", {"layer_types": ["full_attention"] * 2, "num_experts_per_tok": 1}),
    "gemma3n": ("gemma3n", {}),
    "gemma3n unshared": ("gemma3n", {"num_kv_shared_layers": 0, "altup_active_idx": 1, "altup_correct_scale": False}),
    "gemma3n dense": ("gemma3n", {"activation_sparsity_pattern": [0.0] * 5, "num_kv_shared_layers": 3}),
    "gemma3n other copies": ("gemma3n", {"altup_num_inputs": 5, "altup_active_idx": 4}),
    "gemma4": ("gemma4", {}),
    "gemma4 unshared": ("gemma4", {"num_kv_shared_layers": 0, "attention_k_eq_v": False}),
    "gemma4 equal heads": ("gemma4", {"global_head_dim": 16, "num_global_key_value_heads": 2}),
    "gemma4 fewer heads": ("gemma4", {"global_head_dim": 16}),
    "gemma4 plain": ("gemma4", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "gemma4 experts": ("gemma4", EXPERTS),
    "deepseek v2": ("deepseek_v2", {}),
    "deepseek v2 lite": ("deepseek_v2", {"topk_method": "greedy", "n_group": None, "topk_group": None}),
    "deepseek v2 queries": ("deepseek_v2", {"q_lora_rank": 20, "attention_bias": True}),
    "deepseek v3": ("deepseek_v3", {}),
    "deepseek v3 other rope": (
        "deepseek_v3",
        {"rope_interleave": False, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "qwen3 next": ("qwen3_next", {}),
    "qwen3 next dense layer": ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False, "rms_norm_eps": 0.1}),
    "qwen3 next one head": ("qwen3_next", {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 2}),
    "qwen3.5": ("qwen3_5", {}),
    "qwen3.5 biased": ("qwen3_5", {"attention_bias": True, "tie_word_embeddings": True, "linear_num_key_heads": 4}),
    "qwen3.5 moe": ("qwen3_5_moe", {}),
    "relu": ("llama", {"hidden_act": "relu"}),
    "gelu_fast": ("llama", {"hidden_act": "gelu_fast"}),
    "quick_gelu": ("olmo2", {"hidden_act": "quick_gelu"}),
    "relu2": ("phi3", {"hidden_act": "relu2"}),
}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def prompts(**lengths: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, 300, (n,), generator=generator).tolist() for name, n in lengths.items()}


@dataclass
class Expected:
    """A checkpoint in float64, prompts, and their logits by transformers in float64."""

    folder: Path
    texts: dict[str, list[int]]
    logits: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    family, overrides = VARIANTS[request.param]
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), family, torch.float64, **overrides)
    texts = prompts(long=61, short=7, one=20)
    return Expected(folder, texts, oracle(folder, torch.float64, texts))


@pytest.mark.every_second("variant", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_logits_equal_transformers(variant: Expected, dtype: torch.dtype) -> None:
    texts = {name: variant.texts[name] for name in ("long", "short")}
    model = load(variant.folder, dtype)
    whole = HandRunner(model, dtype).run(texts)
    chunked = run_in_steps(HandRunner(model, dtype, slack=3), texts)
    for name in texts:
        expected = variant.logits[name]
        assert expected.std() > 0.5
        torch.testing.assert_close(whole[name].double(), expected, rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(chunked[name].double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_last_tokens_alone_equal_transformers(variant: Expected) -> None:
    """The last layer computes for one token a row; what it leaves in the cache is of all of them."""
    texts, expected = variant.texts, variant.logits
    runner = HandRunner(load(variant.folder, torch.float64), torch.float64, slack=3)
    place = dict.fromkeys(texts, 0)
    for step in ({"long": 5, "one": 19}, {"short": 1, "one": 1, "long": 40}, {"long": 13, "short": 3}, {"short": 3}):
        chunks = {name: texts[name][place[name] : place[name] + size] for name, size in step.items()}
        for name, logits in runner.run_last(chunks).items():
            place[name] += step[name]
            torch.testing.assert_close(logits, expected[name][place[name] - 1], rtol=0, atol=1e-9)
    for name, logits in runner.run({"short": [1], "one": [2], "long": texts["long"][58:]}).items():
        if name == "long":
            torch.testing.assert_close(logits, expected[name][58:], rtol=0, atol=1e-9)


def test_most_of_the_last_layer_is_for_last_tokens_alone(tmp_path: Path) -> None:
    model = load(write_tiny(tmp_path, num_hidden_layers=3))
    rows = [
        [count_rows(part) for part in (block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down)]
        for block in model.layers
    ]
    runner = HandRunner(model)
    batch = runner.batch({"a": [5], "b": [6] * 9, "c": [7] * 30})
    assert model(runner.context(batch, only_last=True)).shape == (3, 64)
    assert rows == [[[40]] * 4, [[40]] * 4, [[40], [3], [3], [3]]]


def test_layers_that_share_caches_make_their_inputs_for_last_tokens_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_tiny(tmp_path, "gemma3n"))
    shape, tail = model.shape.layer_inputs, model.tail
    assert 0 < tail < len(model.layers)
    made: list[tuple[int, ...]] = []
    norm = type(model.layer_inputs.norm).__call__

    def count(self: Any, x: torch.Tensor, *args: Any) -> Any:
        if self is model.layer_inputs.norm:
            made.append(tuple(x.shape))
        return norm(self, x, *args)

    monkeypatch.setattr(type(model.layer_inputs.norm), "__call__", count)
    runner = HandRunner(model)
    model(runner.context(runner.batch({"a": [5], "b": [6] * 9}), only_last=True))
    assert made == [(10, tail, shape.size), (2, shape.num_layers, shape.size)]


def count_rows(product: Linear) -> list[int]:
    """How many rows each call of a product had, from now on."""
    rows: list[int] = []
    made: Any = product.gemm
    product.gemm = lambda x, *args, **around: (rows.append(len(x)), made(x, *args, **around))[1]  # type: ignore[method-assign]
    return rows


def test_the_rope_table_has_a_row_for_each_position_of_long_and_of_short_requests(tmp_path: Path) -> None:
    rope = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32}
    folder = write_tiny(tmp_path, "phi3", torch.float64, **rope)
    texts = prompts(long=61, short=31)
    expected = oracle(folder, torch.float64, texts)
    runner = HandRunner(load(folder, torch.float64, num_positions=100), torch.float64)
    assert len(runner.model.ropes[0].table) == 100 + 32
    batch = runner.batch(texts)
    shift = torch.tensor([0] * 61 + [100] * 31)
    context = runner.context(replace(batch, rope_rows=batch.positions + shift))
    logits = runner.model.logits(runner.model(context))
    torch.testing.assert_close(logits, torch.cat([expected["long"], expected["short"]]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("rope", [YARN_ROPE, LLAMA3_ROPE], ids=["yarn", "llama3"])
def test_without_an_original_length_rope_takes_the_longest_context(rope: dict[str, Any], tmp_path: Path) -> None:
    """As transformers does, which fills it in when it writes a config; older files lack it."""
    folder = write_tiny(tmp_path, dtype=torch.float64, max_position_embeddings=96, rope_parameters=dict(rope))
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]["original_max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    texts = prompts(a=61)
    expected = oracle(folder, torch.float64, texts)["a"]
    found = HandRunner(load(folder, torch.float64), torch.float64).run(texts)["a"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def run_in_steps(runner: HandRunner, texts: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Odd chunks: rows enter late, decode beside others' chunks, single tokens first."""
    done: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    place = dict.fromkeys(texts, 0)
    sizes = [{"long": 5}, {"short": 1, "long": 13}, {"long": 1, "short": 4}, {"short": 1, "long": 1}]
    while any(place[name] < len(texts[name]) for name in texts):
        for step in sizes:
            chunks = {name: texts[name][place[name] : place[name] + size] for name, size in step.items()}
            chunks = {name: ids for name, ids in chunks.items() if ids}
            chunks = dict(sorted(chunks.items(), key=lambda item: len(item[1]) > 1))
            if chunks:
                for name, logits in runner.run(chunks).items():
                    done[name].append(logits)
                    place[name] += len(logits)
    return {name: torch.cat(parts) for name, parts in done.items()}


def test_many_decodes_of_unlike_lengths_equal_transformers(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    texts = prompts(a=3, b=90, c=4, d=5, e=120, f=2, g=33)
    expected = oracle(folder, torch.float64, texts)
    runner = HandRunner(load(folder, torch.float64), torch.float64, num_pages=128)
    for name, ids in texts.items():
        runner.run({name: ids[:-1]})
    last = runner.run({name: ids[-1:] for name, ids in texts.items()})
    for name in texts:
        torch.testing.assert_close(last[name][0], expected[name][-1], rtol=0, atol=1e-9)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_cuda_gives_what_the_cpu_gives(family: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, family)
    texts = prompts(long=61, short=7)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.bfloat16, 1.0)):
        expected = run_in_steps(HandRunner(load(folder, torch.float64), torch.float64), texts)
        runner = HandRunner(load(folder, dtype, device="cuda"), dtype, device="cuda", slack=3)
        for name, logits in run_in_steps(runner, texts).items():
            torch.testing.assert_close(logits.cpu().double(), expected[name], rtol=0, atol=tolerance)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # torch's way to say this CPU has no bfloat16
def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    texts = prompts(a=20)
    exact = HandRunner(load(folder)).run(texts)["a"]
    rough = HandRunner(load(folder, torch.bfloat16), torch.bfloat16).run(texts)["a"]
    assert rough.dtype is torch.bfloat16
    assert (rough.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_unknown_architecture_names_those_we_run(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    text = (folder / "config.json").read_text().replace("LlamaForCausalLM", "OPTForCausalLM")
    (folder / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match="^OPTForCausalLM is not .*PhiForCausalLM.*docs/models.md lists all$"):
        load(folder)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4, "factor": 2.0}},
            "mrope.*default, none, dynamic",
        ),
        ({"hidden_act": "swiglu"}, "swiglu.*relu.*silu"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 2}}, "gptq with 2 bits"),
    ],
)
def test_unsupported_facts_are_refused_by_name(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(write_tiny(tmp_path, **overrides))
