"""Loading: every place exactly once, and each mistake of a checkpoint named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hand_batch import HandRunner
from hand_load import load
from slipstream.base.errors import BadCheckpoint
from slipstream.nn.decoder import Decoder
from slipstream.nn.weights import source
from slipstream.nn.weights.load import find_targets
from slipstream.nn.weights.source import Rules
from tiny import tiny_weights, write_tiny, write_weights

PROMPT = {"a": [3, 1, 4, 1, 5, 9, 2, 6]}


def same(a: Decoder, b: Decoder) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "whole")


def test_shards_load_as_the_whole(folder: Path, tmp_path: Path) -> None:
    assert same(load(folder), load(write_tiny(tmp_path / "shards", shards=3)))


def test_a_whole_file_beside_shards_counts(folder: Path, tmp_path: Path) -> None:
    """As in transformers."""
    shards = write_tiny(tmp_path / "shards", shards=3, seed=1)
    (shards / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert same(load(folder), load(shards))


def test_parts_of_a_merged_projection_lie_in_order(folder: Path) -> None:
    weights = tiny_weights(folder)
    model = load(folder)
    parts = [weights[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert model.layers[1].attention.qkv.weight.data.equal(torch.cat(parts))
    parts = [weights[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert model.layers[0].mlp.gate_up.weight.data.equal(torch.cat(parts))


def test_places_cover_every_parameter_and_nothing_needs_a_gradient(tmp_path: Path) -> None:
    model = load(write_tiny(tmp_path, "qwen3", attention_bias=True))
    filled = sum(torch.Size(place.shape).numel() for place in find_targets(model).values())
    norms = sum(block.attention.norm.weight.numel() - 2 * 24 for block in model.layers)  # kept once per head
    assert filled == sum(parameter.numel() for parameter in model.parameters()) - norms
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_dtype_is_converted_on_the_way(folder: Path) -> None:
    model = load(folder, torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert same(model.float(), load(folder))


def test_old_rotary_buffers_are_skipped(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8)}
    write_weights(folder, tiny_weights(folder) | extra)
    load(folder)


def test_unused_tensors_are_reported_and_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = HandRunner(load(folder)).run(PROMPT)["a"]
    assert not caplog.records
    names = [
        "model.rotary_emb.inv_freq", "v_head.summary.weight", "qa_outputs.weight", "model.layers.0.self_attn.k_scale",
        "model.layers.1.self_attn.k_proj.k_scale", "model.layers.2.mlp.up_proj.weight", "model.layers.2.eh_proj.weight",
        "model.layers.1.self_attn.v_proj.output_scale",
    ]  # fmt: skip
    write_weights(folder, tiny_weights(folder) | {name: torch.rand(3) for name in names})
    assert HandRunner(load(folder)).run(PROMPT)["a"].equal(expected)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("tiny: 8 tensors of the checkpoint are not part of the model")


@pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "self_attn.q_norm.weight", "self_attn.sinks", "mlp.gate"])
def test_a_tensor_that_a_computed_layer_would_need_is_refused(folder: Path, name: str) -> None:
    """With it the layer would give other results: it is another model's."""
    write_weights(folder, tiny_weights(folder) | {f"model.layers.1.{name}": torch.zeros(3)})
    with pytest.raises(BadCheckpoint, match=f"1 unexpected .model.layers.1.{name}"):
        load(folder)


def test_missing_unexpected_and_misshapen_tensors_are_named_together(folder: Path) -> None:
    weights = tiny_weights(folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.7.mlp.up_proj.weight"] = torch.zeros(96, 64)
    weights["something.else"] = torch.zeros(1)
    weights["model.norm.weight"] = torch.zeros(65)
    write_weights(folder, weights)
    with pytest.raises(BadCheckpoint) as error:
        load(folder)
    text = str(error.value)
    assert "1 missing (layers.1.mlp.gate_up.up.weight)" in text
    assert "2 unexpected (model.layers.7.mlp.up_proj.weight, something.else)" in text
    assert "1 of wrong shape (model.norm.weight is [65], expected [64])" in text


def test_a_long_list_of_mistakes_is_cut(folder: Path) -> None:
    write_weights(folder, {"x": torch.zeros(1)})
    with pytest.raises(BadCheckpoint, match=r"20 missing \(.*, \.\.\.\)") as error:
        load(folder)
    assert len(str(error.value)) < 500


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, shards=2)
    weights = tiny_weights(folder)
    first, second = sorted(folder.glob("*.safetensors"))
    write_weights(tmp_path, weights, 1)
    (tmp_path / "model.safetensors").rename(second)  # now the second shard holds all
    with pytest.raises(BadCheckpoint, match="duplicate"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 200, -100])
def test_a_truncated_file_is_one_clear_error(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadCheckpoint, match="model.safetensors is corrupt or truncated"):
        load(folder)


def test_garbage_in_the_header_is_one_clear_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:60] = b"\xff" * 52
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint, match="corrupt"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="lacks 1 of 3 weight files, such as model-00002-of-00003.safetensors"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', json.dumps({"weight_map": {"a": 3}})])
def test_a_broken_index_is_one_clear_error(tmp_path: Path, text: str) -> None:
    folder = write_tiny(tmp_path, shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadCheckpoint, match="index.json is not valid"):
        load(folder)


def test_a_folder_without_weights_says_what_to_do(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="neither.*dummy"):
        load(folder)


def test_dummy_weights_depend_on_seed_and_name_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model, again, other = (load(folder, load_format="dummy", seed=seed) for seed in (0, 0, 1))
    assert same(model, again)
    assert not model.embedding.weight.data.equal(other.embedding.weight.data)
    qkv = [block.attention.qkv.weight.data for block in model.layers]
    assert not qkv[0].equal(qkv[1])
    assert 0.018 < qkv[0].std() < 0.022
    assert model.norm.weight.eq(1).all()
    assert HandRunner(model).run(PROMPT)["a"].isfinite().all()


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_weights_come_in_parts_and_are_the_same(folder: Path, load_format: str, monkeypatch) -> None:
    """No tensor is beside its place whole, where it must be brought into another dtype."""
    whole = load(folder, load_format=load_format)
    monkeypatch.setattr(source, "PART", 200)
    assert same(whole, load(folder, load_format=load_format))
    made: list[int] = []
    tensor = source.SourceTensor("x", (50, 16), "F32", lambda: torch.arange(800.0).view(50, 16))
    monkeypatch.setattr(source, "in_parts", lambda x, real=source.in_parts: made.append(len(real(x))) or real(x))
    target = torch.zeros(50, 16, dtype=torch.float64)
    tensor.write_to(target)
    assert made == [5, 5] and torch.equal(target, torch.arange(800.0, dtype=torch.float64).view(50, 16))


def test_rules_match_whole_names_and_single_parts() -> None:
    rules = Rules({"a.{n}.b_{part}": "x.{n}.{part}", "a.{n}.c": None})
    assert rules.rename("a.12.b_q") == "x.12.q"
    assert rules.rename("a.12.c") is None
    for unknown in ("a.1.2.b_q", "za.1.b_q", "a.1.b_q.r", "a.1.d"):
        with pytest.raises(KeyError):
            rules.rename(unknown)
