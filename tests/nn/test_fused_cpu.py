"""All layers in one C call against the same layers one by one, for every family and kind of weight."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from hand_batch import HandRunner
from hand_load import load
from slipstream.nn.chains import FusedCpu
from slipstream.nn.decoder import Decoder
from slipstream.ops.platform import native
from tiny import write_tiny
from tiny_gguf import write_gguf

PROMPTS = {"a": [5, 9, 33, 2, 71], "b": list(range(3, 40)), "c": [8]}
NEXT = [{"a": [7], "b": [11], "c": [13]}, {"a": [1], "b": [2], "c": [3]}, {"b": [40]}, {"a": [4], "b": [5], "c": [6]}]


@pytest.fixture
def compiled() -> None:
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step ran as one call."""
    made: list[bool] = []
    run = FusedCpu.run

    def counted(self, *args):
        out = run(self, *args)
        made.append(out is not None)
        return out

    monkeypatch.setattr(FusedCpu, "run", counted)
    return made


def steps(model: Decoder, dtype: torch.dtype = torch.float32) -> tuple[HandRunner, list[dict[str, torch.Tensor]]]:
    runner = HandRunner(model, dtype)
    for name, ids in PROMPTS.items():
        runner.run({name: [*ids, 50]})
    return runner, [runner.run(chunks) for chunks in NEXT]


def one_by_one(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> tuple[HandRunner, list[dict[str, torch.Tensor]]]:
    with monkeypatch.context() as patch:
        patch.setattr(FusedCpu, "run", lambda *args: None)
        return steps(model)


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_equals_the_layers_one_by_one(
    family: str, compiled: None, calls: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_tiny(tmp_path, family, rms_norm_eps=0.5))  # large enough to count
    runner, found = steps(model)
    assert calls[len(PROMPTS) :] == [True] * len(NEXT), f"{family} did not run as one call"
    reference, expected = one_by_one(model, monkeypatch)
    for mine, theirs in zip(found, expected, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(runner.caches, reference.caches, strict=True):  # garbage lies where it lay
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "Q4_0"), ("llama", "Q4_1"), ("gemma2", "Q8_0")])
def test_low_bit_weights_too(
    family: str, kind: str, compiled: None, calls: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_gguf(write_tiny(tmp_path, family), gguf.GGMLQuantizationType[kind]), dequantize=False)
    _, found = steps(model)
    assert calls[-1], "low-bit weights did not run as one call"
    _, expected = one_by_one(model, monkeypatch)
    for mine, theirs in zip(found, expected, strict=True):
        for name in mine:
            assert mine[name].equal(theirs[name]), "both ways run the same C code"


@pytest.mark.parametrize("threads", [1, 3])
def test_merged_parts_of_several_kinds(
    threads: int, compiled: None, calls: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GEMM with runs of rows, each of several work items, with and without low-bit weights."""
    kinds = gguf.GGMLQuantizationType
    others = {"attn_k": kinds.F32, "ffn_up": kinds.Q8_0, "attn_q": kinds.BF16}
    folder = write_tiny(tmp_path, "qwen2", intermediate_size=224)  # with a bias
    model = load(write_gguf(folder, kinds.Q4_0, others=others), dequantize=False)
    assert len(model.layers[0].mlp.gate_up.weight.runs) == 2
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _, found = steps(model)
        _, expected = one_by_one(model, monkeypatch)
    finally:
        torch.set_num_threads(before)
    assert all(calls[len(PROMPTS) : len(PROMPTS) + len(NEXT)])
    for mine, theirs in zip(found, expected, strict=True):
        for name in mine:
            assert mine[name].equal(theirs[name]), "both ways run the same C code"


def test_a_rows_result_is_its_own(compiled: None, calls: list[bool], tmp_path: Path) -> None:
    model = load(write_tiny(tmp_path, "llama"))
    _, together = steps(model)
    for name in PROMPTS:
        runner = HandRunner(model)
        runner.run({name: [*PROMPTS[name], 50]})
        for chunks, expected in zip(NEXT, together, strict=True):
            if name in chunks:
                mine = runner.run({name: chunks[name]})[name]
                assert calls[-1]
                # the prompt's keys may differ in the last bit: its products are the library's
                torch.testing.assert_close(mine, expected[name], rtol=1e-5, atol=1e-5)


def test_what_it_does_not_know_runs_one_by_one(compiled: None, calls: list[bool], tmp_path: Path) -> None:
    steps(load(write_tiny(tmp_path / "olmo", "olmo2")))  # norms after, none before
    steps(load(write_tiny(tmp_path / "double", "llama"), torch.float64), torch.float64)
    many = HandRunner(load(write_tiny(tmp_path / "many", "llama")), num_pages=200)
    many.run({str(row): [row] for row in range(70)})
    assert not any(calls)
