"""LoRA adapters inside models: the same hidden states and logits as merged weights, in float64; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hand_batch import HandRunner
from hand_encoder import load_pooling, pack
from hand_load import load
from slipstream.base.errors import InvalidAdapter
from slipstream.checkpoint.model_info import read_model_info
from slipstream.nn.adapters import AdapterLayout, _find_layer, read_adapter
from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.layer import connect_ranks
from slipstream.nn.registry import find_rules
from slipstream.nn.sdpa import SdpaAttention
from slipstream.ops.gemm.lora import LoraTiles
from slipstream.ops.gemm.lora.reference import make_tiles, tile_size
from thread_ranks import run_ranks
from tiny import write_tiny
from tiny_adapter import LLAMA_MODULES, merge, write_adapter
from tiny_encoder import write_tiny_encoder

CHUNKS = {"a": [5], "b": [7, 9, 11, 40, 41], "c": [5, 6, 7]}
SLOTS = [1, -1, 1]


def tiles_of(slots, counts):
    slots, counts = np.array(slots, np.int32), np.array(counts, np.int32)
    total = int(counts.sum())
    order, tiles = make_tiles(slots, counts, total, 2)
    return LoraTiles(torch.from_numpy(order), torch.from_numpy(tiles), tile_size(total))


def adapted(folder, model, adapter, *, generates=True, max_rank=8):
    """Attaches two slots to the model; the adapter is in the second."""
    layout = AdapterLayout(model, max_rank, generates=generates)
    slots = torch.full((2, layout.num_elements), float("nan"), dtype=torch.float64)
    read_adapter(adapter, layout, find_rules(read_model_info(folder), model.shape), slots[1])
    layout.attach(slots)
    return model


def modules_of(folder, model, *, generates=True):
    """All modules of a checkpoint that can have an adapter, and those that are embeddings."""
    layout, rules = AdapterLayout(model, 8, generates=generates), find_rules(read_model_info(folder), model.shape)
    names = [
        name.removesuffix(".weight")
        for name, tensor in load_file(folder / "model.safetensors").items()
        if tensor.dim() == 2 and name.endswith(".weight")
    ]
    plain = [name for name in names if _find_layer(name, layout, rules, is_embedding=False) is not None]
    return plain, [name for name in names if _find_layer(name, layout, rules, is_embedding=True) is not None]


def run(model, *, with_adapter, only_last=False):
    runner = HandRunner(model, dtype=torch.float64)
    counts = [len(ids) for ids in CHUNKS.values()]
    batch = runner.batch(CHUNKS)
    if with_adapter:
        batch = replace(batch, lora=tiles_of(SLOTS, counts), last_lora=tiles_of(SLOTS, [1] * len(counts)))
    hidden = model(runner.context(batch, only_last))
    tiles = batch.last_lora if only_last else batch.lora
    logits = model.logits(hidden, tiles)
    return logits if only_last else [part[-1] for part in logits.split(counts)]


FAMILIES = {  # how many modules can have an adapter
    "llama": 15, "gemma2": 14, "phi3": 9, "qwen3_next": 0, "deepseek_v2": 0, "mamba": 0, "falcon_h1": 0,
    "qwen3_moe": 0, "gemma3n": 0, "gpt2": 8,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_an_adapter_equals_merged_weights(family, tmp_path):
    folder = write_tiny(tmp_path / "base", family, torch.float64)
    base = load(folder, torch.float64)
    modules, embeddings = modules_of(folder, base)
    assert len(embeddings) == 1 and len(modules) >= max(4, FAMILIES[family])
    # a merge into tied weights would change both the embedding and the head
    embeddings = [] if base.shape.tied else embeddings
    transposed = {"fan_in_fan_out": True} if family == "gpt2" else {}
    adapter = write_adapter(tmp_path / "adapter", folder, modules, embeddings=embeddings, spread=0.1, **transposed)
    plain = run(base, with_adapter=False)
    merged = run(load(merge(folder, adapter, tmp_path / "merged"), torch.float64), with_adapter=False)
    model = adapted(folder, base, adapter)
    for only_last in (False, True):
        found = run(model, with_adapter=True, only_last=only_last)
        for index, slot in enumerate(SLOTS):
            wanted = plain if slot < 0 else merged
            torch.testing.assert_close(found[index], wanted[index], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(plain[0], merged[0], atol=1e-3)

    @torch.no_grad()
    def run_rank(rank, group):
        model = adapted(folder, load(folder, torch.float64, shard=(rank, 2)), adapter)
        connect_ranks(model, group)
        return run(model, with_adapter=True)

    for of_rank in run_ranks(2, run_rank):
        for index, slot in enumerate(SLOTS):
            wanted = plain if slot < 0 else merged
            torch.testing.assert_close(of_rank[index], wanted[index], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["bert", "modernbert", "distilbert"])
@torch.inference_mode()
def test_adapters_of_encoders_equal_merged_weights(family, tmp_path):
    folder = write_tiny_encoder(tmp_path / "base", family)
    base = load_pooling(folder, torch.float64)
    modules, embeddings = modules_of(folder, base, generates=False)
    assert len(modules) >= 12 and len(embeddings) == 1
    adapter = write_adapter(tmp_path / "adapter", folder, modules, embeddings=embeddings, spread=0.1)
    texts = list(CHUNKS.values())

    def hidden(model, slots):
        batch, attention = pack(texts), SdpaAttention((), torch.float64)
        if slots is not None:
            batch = replace(batch, lora=tiles_of(slots, [len(ids) for ids in texts]))
        return model(ForwardContext(batch, attention, attention.make_metadata(batch), [], ())).split(
            [len(ids) for ids in texts]
        )

    plain = hidden(base, None)
    merged = hidden(load_pooling(merge(folder, adapter, tmp_path / "merged"), torch.float64), None)
    found = hidden(adapted(folder, base, adapter, generates=False), SLOTS)
    for index, slot in enumerate(SLOTS):
        torch.testing.assert_close(found[index], (plain if slot < 0 else merged)[index], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(plain[0], merged[0], atol=1e-3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("llama"), "llama")
    return folder, load(folder, torch.float64)


@torch.inference_mode()
@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 32}},
        {"fan_in_fan_out": True},  # PEFT ignores it where the layer says how its weight is stored
        {"alpha_pattern": {"(.*.*)*!": 3, "q_proj": 32}},  # `re` needs exponential time for the first
    ],
)
def test_scales_of_an_adapter(llama, tmp_path, settings):
    folder, model = llama
    adapter = write_adapter(tmp_path / "adapter", folder, LLAMA_MODULES[:3], **settings)
    merged = run(load(merge(folder, adapter, tmp_path / "merged"), torch.float64), with_adapter=False)
    found = run(adapted(folder, model, adapter), with_adapter=True)
    torch.testing.assert_close(found[0], merged[0], rtol=1e-9, atol=1e-9)


def read(llama, adapter: Path, **how):
    folder, model = llama
    layout = AdapterLayout(model, how.get("max_rank", 8), generates=how.get("generates", True))
    buffer = torch.zeros(layout.num_elements, dtype=torch.float64)
    return read_adapter(adapter, layout, find_rules(read_model_info(folder), model.shape), buffer)


def test_weights_of_the_base_model_beside_an_adapter(tmp_path):
    """PEFT saves the whole embedding and lm_head with adapters of them."""
    folder = write_tiny(tmp_path / "base", "llama", tie_word_embeddings=False)
    base = folder, load(folder, torch.float64)
    adapter = write_adapter(tmp_path / "a", folder, ["lm_head"], embeddings=["model.embed_tokens"])
    path, weights = adapter / "adapter_model.safetensors", load_file(folder / "model.safetensors")
    own = load_file(path)
    names = {
        f"base_model.model.{name}.base_layer.weight": f"{name}.weight" for name in ("lm_head", "model.embed_tokens")
    }
    saved = {theirs: weights[ours] for theirs, ours in names.items()}
    save_file(own | saved, path)
    assert read(base, adapter)
    for theirs in saved:
        save_file(own | {theirs: saved[theirs][:-1].clone()}, path)
        with pytest.raises(InvalidAdapter, match="the vocabulary was resized"):
            read(base, adapter)
    save_file(own | {"base_model.model.model.layers.0.mlp.up_proj.base_layer.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(InvalidAdapter, match="is a weight of the base model"):
        read(base, adapter)


def test_whether_an_adapter_changes_the_head_is_known(llama, tmp_path):
    assert not read(llama, write_adapter(tmp_path / "a", llama[0], LLAMA_MODULES[:1]))
    assert read(llama, write_adapter(tmp_path / "b", llama[0], ["lm_head"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base model's weights"),
        ({"init_lora_weights": "lora_ga"}, "changes the base model's weights"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern"),
        ({"alpha_pattern": {"(?=q)q_proj": 3}}, "alpha_pattern.*not supported"),
        ({"alpha_pattern": {".{20000}|" * 9 + ".*": 3}}, "alpha_pattern.*states"),
    ],
)
def test_settings_that_are_not_plain_lora_are_refused(llama, tmp_path, settings, message):
    adapter = write_adapter(tmp_path / "adapter", llama[0], LLAMA_MODULES[:1], **settings)
    with pytest.raises(InvalidAdapter, match=message):
        read(llama, adapter)


def test_folders_that_are_broken_are_refused(llama, tmp_path):
    with pytest.raises(InvalidAdapter, match="has no adapter_config.json"):
        read(llama, tmp_path / "nothing")
    adapter = write_adapter(tmp_path / "adapter", llama[0], LLAMA_MODULES[:1])
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidAdapter, match="corrupt or truncated"):
        read(llama, adapter)
    weights.unlink()
    with pytest.raises(InvalidAdapter, match="neither"):
        read(llama, adapter)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(InvalidAdapter, match="not an object"):
        read(llama, adapter)


def test_tensors_that_do_not_fit_are_refused(llama, tmp_path):
    first = LLAMA_MODULES[0]
    adapter = write_adapter(tmp_path / "adapter", llama[0], [first])
    with pytest.raises(InvalidAdapter, match="rank 4, and the engine takes up to 2"):
        read(llama, adapter, max_rank=2)
    with pytest.raises(InvalidAdapter, match="lm_head"):
        read(llama, write_adapter(tmp_path / "head", llama[0], ["lm_head"]), generates=False)
    path = adapter / "adapter_model.safetensors"
    good = load_file(path)
    a, b = f"base_model.model.{first}.lora_A.weight", f"base_model.model.{first}.lora_B.weight"
    bad = [
        ({a: good[a][:, :-1].clone(), b: good[b]}, "another model"),
        ({a: good[a]}, "no matrix B"),
        (good | {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": good[a].clone()}, "cannot have any"),
        (good | {f"base_model.model.{first}.lora_magnitude_vector": good[a][0].clone()}, "DoRA"),
        (good | {"base_model.model.model.norm.weight": good[a][0].clone()}, "fully trained"),
        ({a: good[a] * float("inf"), b: good[b]}, "not finite"),
        ({a: good[a].to(torch.int8), b: good[b]}, "has numbers of type I8"),
    ]
    for tensors, message in bad:
        save_file(tensors, path)
        with pytest.raises(InvalidAdapter, match=message):
            read(llama, adapter)
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
