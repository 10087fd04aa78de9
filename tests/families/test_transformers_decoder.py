"""Decoders by the module of the transformers library with paged attention, against the library alone."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from causal_oracle import oracle
from hand_batch import HandRunner
from hand_load import load_model
from replay_device import ReplayDevice
from slipstream import LLM, SamplingParams
from slipstream.base.errors import InvalidOption, UnsupportedModel
from slipstream.config.config import ModelConfig
from slipstream.nn.transformers_modules import transformers_info
from slipstream.nn.transformers_probe import probe
from tiny import write_tiny
from tiny_saved import save_model
from tiny_tokenizer import write_byte_tokenizer

TINY = {
    "vocab_size": 304, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16, "num_key_value_heads": 4,
}  # fmt: skip
# sizes besides TINY by model type, for those that must run: those without a family of our own first
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo": {}, "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "persimmon": {}, "nanochat": {}, "jais2": {},
    "hyperclovax": {}, "helium": {"head_dim": 16}, "bitnet": {}, "gpt_bigcode": {"n_inner": 96}, "ctrl": {"dff": 96},
    "vaultgemma": {"head_dim": 16, **WINDOWS, "query_pre_attn_scalar": 16},
    "cwm": {"head_dim": 16, **WINDOWS, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "modernbert-decoder": {"local_attention": 8, "layer_types": WINDOWS["layer_types"]},
    "minicpm3": LATENT | {"v_head_dim": 12, "q_lora_rank": 16}, "granite_swa": {},
    "afmoe": {"num_experts": 8, "moe_intermediate_size": 32},  # gives attention its mask by name
    "youtu": LATENT | {"q_lora_rank": 16}, "moshi": {"ffn_dim": 96},
    "phimoe": {"sliding_window": 16, "num_local_experts": 4},  # its window is only in the mask
    "llama": {}, "mistral": {"sliding_window": 9}, "qwen2": {}, "qwen3": {"head_dim": 16}, "phi": {},
    "gemma": {"head_dim": 16}, "gemma2": {"head_dim": 16, **WINDOWS, "query_pre_attn_scalar": 16},
    "glm": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, **WINDOWS, "query_pre_attn_scalar": 16}, "cohere": {}, "cohere2": WINDOWS,
    "olmo2": {}, "olmo3": WINDOWS, "nemotron": {}, "gpt_neox": {},
    "ernie4_5": {"head_dim": 16}, "exaone4": WINDOWS,
    # experts
    "axk1": LATENT | {"q_lora_rank": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                      "n_group": 2, "topk_group": 1},
    "granitemoe_swa": {"sliding_window": 8, "layer_types": WINDOWS["layer_types"], "num_local_experts": 4},
    "mimo_v2_flash": {"head_dim": 16, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 2,
                      "moe_intermediate_size": 32, **WINDOWS},
}  # fmt: skip
# of others: those whose default sizes are of many megabytes
SIZES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"vocab_size_per_layer_input": 304, "hidden_size_per_layer_input": 16},
    "glm4_moe_lite": LATENT | {"q_lora_rank": 16, "n_routed_experts": 8, "moe_intermediate_size": 32},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_intermediate_size": 32},
}  # fmt: skip
NAMES: dict[str, Any] = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
STRIDE = int(os.environ.get("SLIPSTREAM_ARCHITECTURE_STRIDE", 8))  # 1: every model type of the library
# every STRIDE-th of the library's list, without models of images and audio, whose parts have no common sizes
OTHER_SIZES = ("gpt_neo", "mamba2", "zamba2")  # their configs refuse the sizes of TINY
SAMPLED = [kind for index, kind in enumerate(NAMES) if index % STRIDE == 0 and kind not in OTHER_SIZES]
GENERATED = [
    *FAMILIES,
    *(kind for kind in SAMPLED if kind not in FAMILIES and not transformers.CONFIG_MAPPING[kind].sub_configs),
]
STEPS = [{"b": 1, "a": 20}, {"a": 1, "b": 4}, {"b": 1, "a": 8}, {"b": 1, "a": 1}]


ENCODERS = (
    "bert",
    "camembert",
    "data2vec",
    "electra",
    "ernie",
    "roberta",
    "xlm-roberta",
    "megatron",
    "rembert",
    "xmod",
)
"""Model types whose causal LM attends in both directions: they embed."""
REASONS = ("layers of type", "does not support other attention", "does not run on packed tokens", "is neither")


def write_config(folder: Path, kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    config = transformers.CONFIG_MAPPING[kind](**TINY | FAMILIES.get(kind, SIZES.get(kind, {})) | changes)
    config.architectures = [NAMES[kind] if isinstance(NAMES[kind], str) else NAMES[kind][0]]
    config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    return config


def write(folder: Path, kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Path:
    write_config(folder, kind, dtype, **changes)
    save_model(folder, dtype, 0)
    write_byte_tokenizer(folder)
    return folder


def load(folder: Path, dtype: str) -> Any:
    info = transformers_info(str(folder))
    return load_model(ModelConfig(info, str(folder), "tiny", "safetensors", dtype, False, 256, 0), torch.device("cpu"))


@pytest.mark.every_second("kind")
@pytest.mark.parametrize("kind", GENERATED)
def test_logits_equal_the_library_however_texts_are_cut_or_the_error_says_why(kind: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, kind).get_text_config().to_dict()
    # grouped GEMMs of the library's experts take no float64
    dtype = torch.float32 if any("expert" in name for name in config) else torch.float64
    if kind not in FAMILIES:
        try:
            info = transformers_info(str(tmp_path))
        except UnsupportedModel as error:
            assert any(name in str(error) for name in (transformers.CONFIG_MAPPING[kind].__name__[:4], *REASONS)), error
            return
        assert info.is_causal or kind.startswith(ENCODERS), f"{kind} is run as an encoder"
        if not info.is_causal:
            return
    folder = write(tmp_path, kind, dtype)
    prompts = {"a": list(range(5, 35)), "b": list(range(100, 107))}
    expected = oracle(folder, dtype, prompts)
    model = load(folder, str(dtype).removeprefix("torch."))
    cut, last, place = HandRunner(model, dtype, slack=3), HandRunner(model, dtype), {"a": 0, "b": 0}
    for step in STEPS:
        chunks = {name: prompts[name][place[name] : place[name] + size] for name, size in step.items()}
        found, ends = cut.run(chunks), last.run_last(chunks)
        for name, size in step.items():
            wanted = expected[name][place[name] : place[name] + size]
            place[name] += size
            # norms of the library compute in float32
            torch.testing.assert_close(found[name], wanted, rtol=0, atol=2e-4)
            torch.testing.assert_close(ends[name], wanted[-1], rtol=0, atol=2e-4)
    assert expected["a"].std() > 0.05


def test_an_engine_chooses_it_for_architectures_without_a_family(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, "olmo", torch.float32)
    prompts = [list(range(5, 60)), [7, 8, 9], list(range(5, 50))]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with caplog.at_level(logging.WARNING), LLM(str(folder), dtype="float32", num_threads=1, max_num_seqs=2) as llm:
        found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
    assert "transformers' module runs it" in caplog.text
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        wanted = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6,
                                 do_sample=False)[0, len(prompt):]  # fmt: skip
        assert tokens == wanted.tolist()


def test_experts_give_the_tokens_of_our_own_family(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "gpt_oss")  # sinks, windows, experts
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = []
    for impl in ("slipstream", "transformers"):
        with LLM(str(folder), dtype="float32", num_threads=1, max_num_seqs=2, model_impl=impl) as llm:
            outputs = llm.generate([list(range(5, 60)), [7, 8, 9]], params, use_tqdm=False)
            found.append([list(out.outputs[0].token_ids) for out in outputs])
    assert found[0] == found[1]


def test_the_padding_check_of_the_library_is_no_wait(tmp_path: Path) -> None:
    assert transformers_info(str(write(tmp_path, "gpt2"))).backend_waits == ()


@pytest.mark.parametrize(("kind", "whole"), [("olmo", True), ("opt", False)])
def test_decode_steps_are_captured_and_replayed(kind: str, whole: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, kind, torch.float32)
    prompts = [list(range(5, 60)), [7, 8, 9], list(range(5, 50))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = dict(dtype="float32", num_threads=1, max_num_seqs=4, page_size=4)
    with LLM(str(folder), **options) as llm:
        wanted = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
    device = ReplayDevice(1)
    with LLM(str(folder), depth=1, _device=device, **options) as llm:
        llm.core.executor.graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        llm.core.executor.whole_steps = whole
        found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
        captured = {key[0] for key, entry in llm.core.executor.graphs._captured.items() if entry is not None}
    assert found == wanted and ({"step"} if whole else {"forward", "head"}) <= captured and device.num_replays > 9


def test_a_module_that_waits_for_the_device_is_launched_eagerly_and_the_log_names_the_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, "olmo", torch.float32)
    norm = transformers.models.olmo.modeling_olmo.OlmoLayerNorm
    plain = norm.forward

    def waiting(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) if x.abs().max() > 0 else x

    monkeypatch.setattr(norm, "forward", waiting)
    with caplog.at_level(logging.WARNING), LLM(str(folder), dtype="float32", num_threads=1) as llm:
        assert llm.llm_engine.model_config.enforce_eager
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
    line = waiting.__code__.co_firstlineno + 1
    assert f"waits for the device at {Path(__file__).name}:{line} (waiting)" in caplog.text


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["olmo", "opt"])
def test_a_gpu_replays_decode_steps(kind: str, tmp_path: Path) -> None:
    folder, params = write(tmp_path, kind, torch.float32), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for eager in (True, False):
        with LLM(str(folder), dtype="float32", device="cuda", max_num_seqs=4, enforce_eager=eager) as llm:
            outputs = llm.generate([list(range(5, 60)), [7, 8, 9]], params, use_tqdm=False)
            found.append([list(out.outputs[0].token_ids) for out in outputs])
            graphs = llm.core.executor.graphs
            assert not graphs.gave_up and bool(graphs.num_captured) != eager
    assert found[0] == found[1]


@pytest.mark.cuda
def test_a_gpu_gives_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    folder = write(tmp_path, "olmo", torch.float32, hidden_size=256)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(folder), dtype="float32", device=device, max_num_seqs=2) as llm:
            outputs = llm.generate([list(range(5, 60)), [7, 8, 9], list(range(5, 50))], params, use_tqdm=False)
            found.append([list(out.outputs[0].token_ids) for out in outputs])
    assert found[0] == found[1]


def test_a_mask_that_paged_attention_does_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = transformers.models.olmo.modeling_olmo
    plain = module.create_causal_mask
    parts: list[Any] = []
    folder = write(tmp_path, "olmo", torch.float32)

    def masked(**kwargs: Any) -> Any:
        return plain(and_mask_function=parts[-1], **kwargs)

    assert {call.window for call in probe(str(folder)).calls} == {0}
    monkeypatch.setattr(module, "create_causal_mask", masked)
    masks: tuple[Any, ...] = (
        lambda batch, head, query, key: key // 100 == query // 100,  # chunks
        lambda batch, head, query, key: (key > query - 100) | (key < 4),  # a window and the first positions
        lambda batch, head, query, key: (key != query) | (query < 9),  # from one position on, not itself
        lambda batch, head, query, key: torch.zeros(9, device="meta")[key] > 0,  # of values
    )
    for mask in masks:
        parts.append(mask)
        probe.cache_clear()
        with pytest.raises(UnsupportedModel, match="OlmoAttention.*masks positions"):
            probe(str(folder))
    parts.append(lambda batch, head, query, key: key > query - 100)
    probe.cache_clear()
    assert {call.window for call in probe(str(folder)).calls} == {100}
    probe.cache_clear()

    def windowed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, sliding_window=100, **kwargs)

    own = module.OlmoAttention.forward
    monkeypatch.setattr(module.OlmoAttention, "forward", windowed)
    assert {call.window for call in probe(str(folder)).calls} == {100}  # the argument and the mask agree
    parts.append(lambda batch, head, query, key: key > query - 101)
    probe.cache_clear()
    with pytest.raises(UnsupportedModel, match="with a window of 100"):
        probe(str(folder))
    monkeypatch.undo()
    probe.cache_clear()

    def biased(**kwargs: Any) -> Any:
        return None if plain(**kwargs) is None else torch.zeros(1, 1, 5, 5)  # of the library's own, as ALiBi's

    monkeypatch.setattr(module, "create_causal_mask", biased)
    with pytest.raises(UnsupportedModel, match="OlmoAttention.*masks positions"):
        probe(str(folder))
    probe.cache_clear()


def test_what_it_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama", torch.float32)
    config = json.loads((folder / "config.json").read_text())

    def refused(
        words: str, error: type[Exception] = UnsupportedModel, impl: str = "transformers", **facts: Any
    ) -> None:
        changed = tmp_path / str(len(list(tmp_path.iterdir())))
        changed.mkdir()
        (changed / "config.json").write_text(json.dumps(config | facts))
        (changed / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        write_byte_tokenizer(changed)
        with pytest.raises(UnsupportedModel, match=words):
            LLM(str(changed), dtype="float32", num_threads=1, model_impl=impl)

    refused("no decoder or encoder 'Nothing'", architectures=["Nothing"])
    refused("Nothing is not an architecture.*no decoder", architectures=["Nothing"], impl="auto")
    refused("Nothing is not an architecture", architectures=["Nothing"], impl="slipstream")
    refused(
        "has no model_type 'dots3_note_text'$", architectures=["Dots3NoteForCausalLM"], model_type="dots3_note_text"
    )
    refused("cannot read its config.json", hidden_size="wide")
    refused("rope of type dynamic", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    refused("does not support other attention", architectures=["BloomForCausalLM"], model_type="bloom")
    with pytest.raises(InvalidOption, match="deterministic"):
        LLM(str(folder), dtype="float32", num_threads=1, model_impl="transformers", deterministic=True)
