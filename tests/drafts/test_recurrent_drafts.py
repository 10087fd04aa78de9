"""Drafts with recurrent states (law 7, in float64): tokens are those without drafts, whatever is drafted, and rejected
drafts leave no trace in states and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delayed_device import DelayedDevice
from engine.test_recurrent_states import GREEDY, PROMPTS, SAMPLED, Model, alone, check, make
from recurrent_model import DecayShape, write_recurrent
from replay_device import ReplayDevice
from replay_drafter import ReplayDrafter
from slipstream import LLM
from slipstream.base.errors import UnsupportedModel
from slipstream.config.memory import estimate_memory
from slipstream.runner.stores import StateStore
from slipstream.serve.cli.main import main
from tiny import write_tiny

LONG = GREEDY.with_changes(max_tokens=28)
ASKED = [PROMPTS[number] for number in (0, 2, 3, 5)]  # two answers cross a border


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as patch:
        path = str(write_recurrent(tmp_path_factory.mktemp("model"), "hybrid", patch))
        yield Model(path, alone(path, LONG, ASKED))


def drafting(llm: LLM, kind: str, results: list[Any]) -> LLM:
    llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
    if kind != "ngram":
        texts = [result.prompt_token_ids + sample.token_ids for result in results for sample in result.outputs]
        ReplayDrafter.replace(llm, texts, kind)
    return llm


CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "right, chunked and cached": ("right", dict(max_num_batched_tokens=43, depth=2)),
    "wrong, cached": ("wrong", dict(num_checkpoints=4, depth=2)),
    "random, chunked, many drafts": ("random", dict(max_num_batched_tokens=61, depth=2, drafts="ngram:9")),
    "ngram, cached": ("ngram", dict(depth=1)),
    "random, preempted": ("random", dict(num_pages=96, page_size=4, depth=1, max_num_batched_tokens=90)),
}


@pytest.mark.parametrize("cell", CELLS)
def test_tokens_do_not_depend_on_drafts(hybrid: Model, cell: str, tmp_path: Path) -> None:
    kind, options = CELLS[cell]
    with make(hybrid.folder, **{"drafts": "ngram:3"} | options) as llm:
        drafting(llm, kind, hybrid.wanted)
        for _ in range(2):  # the second time the cache is warm
            check(llm, hybrid.wanted, LONG)
        counts = llm.core.scheduler.drafts.counts
        assert counts.num_drafts > 40 and (counts.num_accepted > 0) == (kind != "wrong")
        if kind == "right":
            assert counts.num_accepted == counts.num_drafts, "a right draft was rejected"
        if "cached" in cell:
            assert llm.core.scheduler.cache.num_hits > 190
        if "preempted" in cell:
            assert llm.core.scheduler.num_preemptions > 0
        if "ngram" in cell:
            llm.save_record(tmp_path / "record")
            assert main(["replay", str(tmp_path / "record"), "--json"]) == 0


def test_models_without_attention(tmp_path: Any) -> None:
    """Their rows have their own history, also of prefixes that come from a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(write_recurrent(tmp_path, "recurrent", patch))
        wanted = alone(folder, LONG, ASKED)
        with make(folder, drafts="ngram:3", depth=1) as llm:
            drafting(llm, "right", wanted)
            for _ in range(2):
                check(llm, wanted, LONG)
            counts = llm.core.scheduler.drafts.counts
            assert counts.num_accepted == counts.num_drafts > 40 and llm.core.scheduler.cache.num_hits > 190


def test_a_conversation_continues_from_a_checkpoint_after_accepted_drafts(hybrid: Model) -> None:
    """The second turn begins with the first prompt and its answer, which crosses a border."""
    turns = [result.prompt_token_ids + result.outputs[0].token_ids for result in hybrid.wanted]
    wanted = alone(hybrid.folder, GREEDY, turns)
    with make(hybrid.folder, drafts="ngram:3", depth=1, num_checkpoints=24) as llm:
        drafting(llm, "random", [*hybrid.wanted, *wanted])
        check(llm, hybrid.wanted, LONG)
        got = llm.generate(turns, GREEDY, use_tqdm=False)
        assert [result.outputs[0].token_ids for result in got] == [result.outputs[0].token_ids for result in wanted]
        answered = [
            result.num_cached_tokens == len(turn) // 64 * 64
            for result, turn, first in zip(got, turns, hybrid.wanted, strict=True)
            if len(turn) // 64 * 64 > len(first.prompt_token_ids)
        ]
        assert answered == [True, True], "a turn did not continue from a state after generated tokens"


def test_samples_of_a_prompt(hybrid: Model) -> None:
    wanted = alone(hybrid.folder, SAMPLED, ASKED)
    with make(hybrid.folder, drafts="ngram:3", depth=1) as llm:
        drafting(llm, "random", wanted)
        check(llm, wanted, SAMPLED)
        assert llm.core.scheduler.drafts.counts.num_accepted > 20


def test_replayed_steps_with_drafts(hybrid: Model) -> None:
    """Padded steps are captured and replayed: the host knows neither offsets nor replays."""
    device = ReplayDevice(1)
    with make(hybrid.folder, device, depth=1, max_num_batched_tokens=100, num_checkpoints=3, drafts="ngram:3") as llm:
        llm.core.executor.graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        drafting(llm, "random", hybrid.wanted)
        for _ in range(2):
            check(llm, hybrid.wanted, LONG)
        assert device.num_replays > 20 and llm.core.scheduler.drafts.counts.num_accepted > 40


def test_a_late_device_changes_nothing(hybrid: Model) -> None:
    with make(hybrid.folder, DelayedDevice(2), depth=2, page_size=4, num_checkpoints=3, drafts="ngram:3") as llm:
        drafting(llm, "ngram", hybrid.wanted)
        check(llm, hybrid.wanted, LONG)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_delta_nets_and_state_spaces(tmp_path: Any, family: str) -> None:
    folder = str(write_tiny(tmp_path, family))
    options: dict[str, Any] = dict(load_format="auto", max_model_len=200)
    prompts = [prompt[:90] for prompt in ASKED]
    with make(folder, max_num_seqs=1, enable_prefix_caching=False, **options) as llm:
        wanted = llm.generate(prompts, LONG, use_tqdm=False)
    for kind in ("random", "ngram"):
        with make(folder, drafts="ngram:3", depth=1, max_num_batched_tokens=50, **options) as llm:
            drafting(llm, kind, wanted)
            check(llm, wanted, LONG)
            assert llm.core.scheduler.drafts.counts.num_drafts > 40


def test_memory_is_what_the_plan_says(hybrid: Model) -> None:
    """Rings of inputs belong to rows; checkpoints have none."""
    with make(hybrid.folder, max_num_seqs=5, num_checkpoints=3, drafts="ngram:3") as llm:
        memory, states = estimate_memory(llm.core.config, 0), llm.core.executor.find(StateStore)
        assert memory.states + memory.checkpoints == states.num_bytes
        assert [tuple(site["replay"].shape) for site in states.sites] == [(6, 8, 48), (6, 8, 48), (6, 8, 32)]


def test_a_mixer_that_cannot_undo_drafts_is_refused_with_them(hybrid, monkeypatch):
    fields = DecayShape.state_fields
    monkeypatch.setattr(DecayShape, "state_fields", lambda shape, dtype, num_drafts=0: fields(shape, dtype))
    make(hybrid.folder).close()
    with pytest.raises(UnsupportedModel, match="decay keeps no inputs to undo rejected drafts"):
        make(hybrid.folder, drafts="ngram:3")
