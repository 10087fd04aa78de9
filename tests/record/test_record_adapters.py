"""Recordings of engines with LoRA adapters: a replay reads them again, wherever they are, or refuses by name."""

from __future__ import annotations

import json
import shutil

import pytest

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.record.record_file import decode
from slipstream.record.replay import replay
from slipstream.serve.cli.main import main
from tiny import write_tiny
from tiny_adapter import write_adapter

PROMPTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9], [7, 8], [9] * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`all.slipstream` has every step, `last.slipstream` the last ones. Three adapters share two slots."""
    folder = tmp_path_factory.mktemp("record")
    model = write_tiny(folder / "model", "llama")
    names = ("sql", "law", "old")
    loras = [LoRARequest(name, 1 + i, str(write_adapter(folder / name, model, seed=i))) for i, name in enumerate(names)]
    options = dict(
        dtype="float64", num_threads=1, page_size=4, num_pages=64, max_num_seqs=4, max_num_batched_tokens=16,
        max_model_len=64, use_tqdm_on_load=False, enable_lora=True, max_loras=2, max_cpu_loras=2, max_lora_rank=8,
    )  # fmt: skip
    with LLM(str(model), **options) as llm:
        params = SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)
        llm.generate(PROMPTS, params, lora_request=[loras[2], None, loras[2], None], use_tqdm=False)
        llm.generate(PROMPTS, params, lora_request=[loras[0], loras[1], None, loras[1]], use_tqdm=False)
        others = [[token + 20 for token in prompt] for prompt in PROMPTS]
        llm.generate(others, params, lora_request=loras[1], use_tqdm=False)
        llm.save_record(folder / "all.slipstream")
        recorder = llm.core.recorder
        while recorder._ring[0].plan.adapters is None or not any(
            load.name == "law" for load in recorder._ring[0].plan.adapters.loads
        ):
            recorder._evict()
        recorder._evict()
        llm.save_record(folder / "last.slipstream")
    return folder


def read(folder, name):
    return decode((folder / name).read_bytes(), name)


def run(capsys, *argv):
    code = main(["replay", *map(str, argv), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else err


def test_every_result_is_compared(folder, capsys):
    code, report = run(capsys, folder / "all.slipstream")
    assert (code, report["difference"], report["num_skipped"]) == (0, None, 0)
    assert report["num_compared"] == 7 * 3 * len(PROMPTS)
    loads = [load for step in read(folder, "all.slipstream").steps if (a := step.plan.adapters) for load in a.loads]
    assert {load.name for load in loads} == {"sql", "law", "old"} and all(load.digest for load in loads)


def test_adapters_loaded_before_the_first_step_are_loaded_again(folder, capsys):
    recording = read(folder, "last.slipstream")
    assert {load.name for load in recording.adapters} == {"law", "sql"}
    code, report = run(capsys, folder / "last.slipstream")
    assert (code, report["difference"]) == (0, None) and report["num_compared"] >= 7 * len(PROMPTS)


def test_the_adapter_of_each_row_matters(folder, capsys, tmp_path):
    recording = read(folder, "all.slipstream")
    for step in recording.steps:
        if step.plan.adapters is not None and step.plan.adapters.slots is not None:
            slots = step.plan.adapters.slots
            object.__setattr__(step.plan.adapters, "slots", slots * 0 - 1)
    (tmp_path / "file").write_bytes(recording.encode())
    code, report = run(capsys, tmp_path / "file")
    assert code == 1 and report["difference"].startswith("step ")


def test_a_slot_without_an_adapter_is_a_fault(folder):
    recording = read(folder, "last.slipstream")
    recording.adapters = recording.adapters[:0]
    assert "which has no adapter" in replay(recording).fault


def test_an_adapter_that_moved_is_named_and_given_by_a_flag(folder, capsys, tmp_path):
    moved = tmp_path / "law"
    shutil.move(folder / "law", moved)
    try:
        code, error = run(capsys, folder / "all.slipstream")
        assert code == 2 and "the adapter law is not in" in error and "--lora-modules law=FOLDER" in error
        code, report = run(capsys, folder / "all.slipstream", "--lora-modules", f"law={moved}")
        assert (code, report["difference"], report["num_skipped"]) == (0, None, 0)
        code, error = run(capsys, folder / "all.slipstream", "--lora-modules", f"law={folder / 'sql'}")
        assert code == 2 and "has other matrices than in the recording" in error
        assert run(capsys, folder / "all.slipstream", "--check-only")[0] == 0
    finally:
        shutil.move(moved, folder / "law")


def test_an_adapter_that_no_step_reads_may_be_gone(folder):
    recording = read(folder, "last.slipstream")
    assert [load.name for load in recording.adapters_read()] != ["law"]
    law = next(load.slot for load in recording.adapters if load.name == "law")
    recording.steps = [step for step in recording.steps if (a := step.plan.adapters) and set(a.slots.tolist()) == {law}]
    assert [load.name for load in recording.adapters_read()] == ["law"]
