"""Rows with recurrent states sit out steps whose masks are late, with drafts and without, and draw the same tokens
(law 7), in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mask_gate import DraftGate, MaskGate
from recurrent_model import write_recurrent
from repeats import slow
from replay_drafter import ReplayDrafter
from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.contracts.messages import Abort, Output, Submit
from slipstream.runner.stores import StateStore
from slipstream.scheduler.grammar import mask_pool
from slipstream.serve.cli.main import main
from tiny import write_tiny
from tiny_drafters import write_mtp

pytestmark = pytest.mark.skipif(mask_pool.load() is None, reason="no C compiler")
TEXT = random.Random(0).choices(range(300), k=130)
SHAPES = ["[a-e]{3}(xyzzy|vwvw)[0-9]{2,5}", "[a-p]{12}", "(yes|no), [a-z]{9}"]
CELLS: dict[str, dict[str, Any]] = {
    "always late, chunked": dict(depth=0, max_num_batched_tokens=43, enable_prefix_caching=False),
    "cached": dict(depth=1, num_checkpoints=16),
    "preempted, chunked, cached": dict(depth=2, max_num_batched_tokens=61, num_checkpoints=4),
    "drafts, chunked": dict(depth=0, drafts="ngram:3", max_num_batched_tokens=43, enable_prefix_caching=False),
    "drafts, cached": dict(depth=2, drafts="ngram:4", num_checkpoints=16),
    "drafts, preempted, chunked, cached": dict(depth=2, drafts="ngram:3", max_num_batched_tokens=61, num_checkpoints=4),
    "suffix, cached": dict(depth=1, drafts="suffix:3", num_checkpoints=16),
    "mtp, cached": dict(depth=1, speculative_config={"method": "mtp", "num_speculative_tokens": 3}, num_checkpoints=16),
}
# The test model, which is fast, in most cells; every kind of layer with all features, and once in each other cell.
CELLS_OF = {
    "mamba": ["preempted, chunked, cached"],
    "mamba2": ["cached", "preempted, chunked, cached", "drafts, cached"],
    "qwen3_next": ["always late, chunked", "preempted, chunked, cached", "drafts, chunked"],
    "qwen3_5": ["preempted, chunked, cached", "drafts, preempted, chunked, cached", "mtp, cached"],
    "lfm2": ["drafts, preempted, chunked, cached"],
    "decay": [cell for cell in CELLS if cell not in ("drafts, chunked", "mtp, cached")],
}
REPEATED = [
    ("mamba2", "cached"),
    ("mamba2", "drafts, cached"),
    ("qwen3_next", "always late, chunked"),
    ("qwen3_5", "preempted, chunked, cached"),
]  # all features of theirs are in other cells


def messages() -> list[Submit]:
    """Prompts of one token and more, with common prefixes; answers cross the border at 64. Some have no grammar."""
    prompts = [[5], TEXT[:61], TEXT[:70], TEXT[:118], [*TEXT[:64], 9, 8], TEXT[:45]]
    asked = []
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=number % 2, seed=number, max_tokens=12, ignore_eos=True)
        if number != 3:
            shape = StructuredOutputsParams(regex=SHAPES[number % 3])
            params = params.with_changes(structured_outputs=shape)
        asked.append(Submit(str(number), prompt, params, 0.0))
    return asked


def make(folder: str, **options: Any) -> LLM:
    usual = dict(
        dtype="float64", num_threads=1, max_model_len=160, max_num_seqs=8, num_pages=200, depth=0,
        use_tqdm_on_load=False,
    )  # fmt: skip
    llm = LLM(folder, **(usual | options))
    for tensor in llm.core.executor.find(StateStore).tensors.values():
        tensor.fill_(float("nan"))  # states are never cleared
    return llm


class Run:
    """All messages through a core, step by step."""

    def __init__(self, llm: LLM, gates: Sequence[MaskGate | DraftGate] = (), dice: random.Random | None = None) -> None:
        self.core, self.tokens, self.gates, self.dice = llm.core, {}, gates, dice  # type: ignore[var-annotated]

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        self.core.scheduler.check()

    def all(self, is_preempted: bool = False) -> dict[str, list[int]]:
        core, dice = self.core, self.dice
        asked = messages()
        core.submit(*asked, Submit("aborted", *map(asked[1].__getattribute__, ("prompt_token_ids", "params")), 0.0))
        while core.has_requests():
            if dice is not None:
                core.constraints.min_budget = dice.choice([0.0, 0.01])  # a late row is not slow for ever
            self.take(core.step())
            if dice is None or dice.random() < 0.7:
                for gate in self.gates:
                    gate.let_pass()
            if len(self.tokens.get("aborted", ())) > 5:
                core.abort(Abort("aborted"))
            if dice is not None and is_preempted and dice.random() < 0.1:
                self.take(core.drain())
                core.scheduler.preempt_all()
        self.tokens.pop("aborted")
        return self.tokens


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder, and the tokens without late masks."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "decay":
            path: Path = write_recurrent(folder, "hybrid", patch)
        elif request.param == "qwen3_5":
            path = write_mtp(folder, request.param)
        else:
            path = write_tiny(folder, request.param, torch.float64)
        with make(str(path), enable_prefix_caching=False, load_format=formats(request.param)) as llm:
            wanted = Run(llm).all()
        yield request.param, str(path), wanted


def has_drafts(cell: str) -> bool:
    return not CELLS[cell].keys().isdisjoint({"drafts", "speculative_config"})


def formats(family: str) -> str:
    return "dummy" if family == "decay" else "auto"


@pytest.mark.parametrize(
    ("model", "cell"),
    [
        slow(*case) if case in REPEATED else case
        for family in CELLS_OF
        for case in itertools.product([family], CELLS_OF[family])
    ],
    indirect=["model"],
)
def test_rows_sit_out_steps_and_draw_the_same_tokens(
    model: Any, cell: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    family, folder, wanted = model
    dice = random.Random(cell)
    chance = 1.0 if "always" in cell else 0.3 if has_drafts(cell) else 0.5
    gates = [gate(monkeypatch, lambda _: dice.random() < chance) for gate in (MaskGate, DraftGate)]
    with make(folder, load_format=formats(family), **CELLS[cell]) as llm:
        scheduler, sat = llm.core.scheduler, []
        scheduler.drafts.length = None  # all plans have drafts, whatever they cost
        if "drafts" in cell:
            texts = [[*each.prompt_token_ids, *wanted[each.request_id]] for each in messages()]
            ReplayDrafter.replace(llm, texts, "random")
        sit_out = scheduler.sit_out
        monkeypatch.setattr(scheduler, "sit_out", lambda *given: sat.extend(given[1]) or sit_out(*given))
        counts, least = scheduler.drafts.counts, 2 if cell in ("cached", "mtp, cached") else 1
        for number in range(1, 9):  # the second time the cache is warm
            assert Run(llm, gates, dice).all("preempted" in cell) == wanted
            # it depends on threads which rows have drafts when their masks are late
            has_all = not has_drafts(cell) or (0 < counts.num_accepted < counts.num_drafts and gates[1].num_stopped)
            if number >= least and has_all:
                break
        assert has_all and len(sat) > 5
        if llm.config.cache.prefix_caching:
            assert scheduler.cache.num_hits >= 64
        if (family, cell) in (("mamba2", "cached"), ("decay", "suffix, cached")):
            llm.save_record(tmp_path / "record")
            assert main(["replay", str(tmp_path / "record"), "--json"]) == 0
