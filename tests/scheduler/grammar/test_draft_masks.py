"""Grammars with drafts, on a scripted device: the output is the one without drafts, right drafts save steps, and
forbidden drafts are not accepted."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import numpy as np
import pytest
from test_constraints import SHAPES, core_of, prompts, run, with_grammar

from letter_tokenizer import END, TOKENIZER, oracle_matcher
from mask_gate import DraftGate
from patience import PATIENCE
from scripted_engine import submit, tokens_alone
from scripted_tokens import VOCAB
from slipstream.contracts.messages import Abort
from slipstream.params.structured import StructuredOutputsParams as Shape
from slipstream.scheduler.cache.states import StateCache
from slipstream.scheduler.grammar import draws
from slipstream.scheduler.grammar.draws import DraftFiller, DraftRow, fill_along
from slipstream.scheduler.grammar.session import CompiledGrammar, Session

__all__ = ["core_of"]  # a fixture


def drafting(core: Any, texts: list[list[int]], kind: str, num_drafts: int = 3) -> None:
    """The device drafts what follows in these texts, or other tokens."""
    after: dict[tuple[int, ...], list[int]] = {}
    for text in texts:
        for length in range(1, len(text)):
            after.setdefault(tuple(text[:length]), text[length:])
    device, rng = core.executor.executor, random.Random(0)

    def guess(state: Any, last: int) -> list[int]:
        right = (after.get((*device._see(state), last), []) + [-1] * 8)[:8]
        wrong = [(token + 1) % VOCAB for token in right]
        if kind == "right":
            return right
        return [rng.choice(pair) for pair in zip(right, wrong, strict=True)] if kind == "random" else wrong

    device.drafter, device._guess = rng, guess
    core.scheduler.drafts.num_drafts = core.scheduler.drafts.num_proposed = num_drafts
    if (states := core.scheduler.cache.states) is not None:  # those that an engine with drafts has
        core.scheduler.cache.states = StateCache(core.config.cache.states, states.page_size, num_drafts)


def preempting(core: Any) -> None:
    """Preempt the youngest request before every fifth step."""
    step, numbers = core.step, itertools.count(1)

    def preempt_and_step() -> Any:
        running = core.scheduler._row_allocator.running
        if next(numbers) % 5 == 0 and running:
            core.scheduler._running.preempt(running[-1])
        return step()

    core.step = preempt_and_step


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_tokens_are_those_without_drafts(core_of: Any, depth: int, kind: str) -> None:
    core = core_of(depth, num_pages=200)
    messages = prompts(SHAPES, n=2, logprobs=1 if kind == "right" else None)  # with logprobs no token is appended
    plain = [submit(f"p{i}", [50 + i, 3], max_tokens=30) for i in range(2)]
    wanted = {message.request_id: with_grammar(message) for message in messages}
    texts = [message.prompt_token_ids + tokens for message in messages for tokens, _ in wanted[message.request_id]]
    drafting(core, texts + [message.prompt_token_ids + tokens_alone(message, 0)[0] for message in plain], kind)
    core.submit(*messages, *plain)
    if kind == "random":
        preempting(core)
    found = run(core)
    for message in messages:
        for sample, (tokens, reason) in enumerate(wanted[message.request_id]):
            assert found[message.request_id, sample][:2] == (tokens, reason)
    for message in plain:
        assert found[message.request_id, 0][:2] == tokens_alone(message, 0)
    device = core.executor.executor
    assert (device.num_accepted > 15) == (kind != "wrong") and (kind == "right" or device.num_rejected > 15)
    assert (core.scheduler.num_preemptions > 3) == (kind == "random")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("ends", ["drawn", "aborted", "preempted"])
def test_a_late_mask_along_drafts_delays_no_other_row(core_of: Any, monkeypatch: Any, depth: int, ends: str) -> None:
    core, messages = core_of(depth, num_pages=200), prompts(SHAPES, logprobs=1)
    texts = [message.prompt_token_ids + with_grammar(message)[0][0] for message in messages]
    drafting(core, texts, "right")
    for message in messages:
        core.constraints.grammars.compile(message.params.structured_outputs).result()
    core.submit(*messages, submit("p", [50, 3], max_tokens=30))
    (slow,) = core.scheduler._lifecycle.live["r3"]
    gate = DraftGate(monkeypatch, lambda session: session is slow.session)
    found: dict[str, list[int]] = {}

    def take(outputs: Any) -> None:
        for output in outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
        core.scheduler.check()

    while not gate.num_stopped:
        core.constraints.min_budget = 0.02
        take(core.step())
    while set(core.scheduler._lifecycle.live) != {"r3"}:  # all others end
        take(core.step())
    assert slow.session.is_busy and core.executor.executor.num_sat_out >= 1
    if ends == "aborted":
        core.abort(Abort("r3"))
    elif ends == "preempted":
        take(core.drain())
        core.scheduler.preempt_all()
    gate.is_open.set()
    while core.has_requests():
        take(core.step())
    for message, text in zip(messages, texts, strict=True):
        wanted = text[len(message.prompt_token_ids) :]
        own = found.get(message.request_id, [])
        assert own == (wanted[: len(own)] if ends == "aborted" and message.request_id == "r3" else wanted)
    assert found["p"] == tokens_alone(submit("p", [50, 3], max_tokens=30), 0)[0]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_checkpoints", [None, 24], ids=["plain", "recurrent"])
def test_masks_along_drafts_are_late_by_chance_and_no_token_changes(
    core_of: Any, monkeypatch: Any, depth: int, num_checkpoints: int | None
) -> None:
    dice = random.Random(depth)
    gate = DraftGate(monkeypatch, lambda _: dice.random() < 0.2)
    core, messages = core_of(depth, num_pages=60, num_checkpoints=num_checkpoints), prompts(SHAPES * 2, n=2)
    texts = [m.prompt_token_ids + tokens for m in messages for tokens, _ in with_grammar(m)]
    drafting(core, texts, "random")
    preempting(core)
    core.constraints.min_budget = 0.0
    core.submit(*messages, submit("p", [50, 3], max_tokens=40))
    found: dict[Any, list[int]] = {}
    while core.has_requests():
        for output in core.step():
            found.setdefault((output.request_id, output.sample), []).extend(output.token_ids)
        core.scheduler.check()
        if dice.random() < 0.5:
            gate.let_pass()
    device = core.executor.executor
    assert device.num_sat_out > 5 and core.scheduler.num_preemptions > 3
    if num_checkpoints is not None:
        assert device.states.num_saved > 5 and device.states.num_restored > 5
    for message in messages:
        assert [found[message.request_id, sample] for sample in range(2)] == [own for own, _ in with_grammar(message)]


def test_rows_behind_late_ones_sit_out_and_are_filled_later() -> None:
    finished = threading.Event()
    filler = DraftFiller(VOCAB, finished)
    grammar = CompiledGrammar(oracle_matcher(Shape(regex="[ab]{9}")))
    sessions = [Session(grammar, [1], 1, [END], VOCAB) for _ in range(4)]
    opened, real = threading.Event(), draws.fill_along
    words = (VOCAB + 32) // 32
    rows = [DraftRow(session, np.zeros((2, words), np.uint32)) for session in sessions]
    masks = [row._masks for row in rows]

    def gated(session: Session, *args: Any) -> None:
        if session is not sessions[0]:
            assert opened.wait(PATIENCE)
        real(session, *args)

    draws.fill_along = gated
    try:
        filler.fill(rows, 0.01, 0.0)
        assert [row.is_late for row in rows] == [False, True, True, True]
        assert [session.is_busy for session in sessions] == [False, True, True, False]  # there are two threads
        opened.set()
        for session in sessions[1:3]:
            assert session.job is not None
            session.job.result()
            assert session.ready is not None and (session.ready == masks[0][0]).all()
        assert masks[0][0].any() and not masks[1].any()  # the memory of a step that has gone on is not written
        again = DraftRow(sessions[3], np.zeros((2, words), np.uint32))
        filler.fill([again], 60.0, 0.0)
        assert not again.is_late and finished.is_set()
    finally:
        draws.fill_along = real
        filler.close()


def test_right_drafts_save_steps(core_of: Any) -> None:
    steps = []
    for kind in ("wrong", "right"):
        core = core_of(1)
        (message,) = prompts([Shape(regex="[0-9]{30,33}")], logprobs=0)
        ((tokens, _),) = with_grammar(message)
        drafting(core, [message.prompt_token_ids + tokens], kind)
        core.submit(message)
        assert run(core)["r0", 0][0] == tokens
        steps.append(core.num_steps)
    assert steps[1] * 2 < steps[0]


def test_masks_follow_drafts_until_one_is_forbidden() -> None:
    session = Session(CompiledGrammar(oracle_matcher(Shape(regex="a[bc](d|e[0-9])"))), [], 0, [END], VOCAB)
    letter = {text: TOKENIZER.encode(text)[0] for text in "abcde5"}
    session.drafts = [letter["a"], letter["c"], letter["a"]]
    masks = np.zeros((4, (VOCAB + 32) // 32), np.uint32)
    fill_along(session, masks, VOCAB)
    allowed = [set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB])) for mask in masks]
    assert allowed[0] == {letter["a"]} and allowed[1] == {letter["b"], letter["c"]}
    assert allowed[2] == {letter["d"], letter["e"]}
    assert len(allowed[3]) == VOCAB, "the third draft is forbidden: the draw after it does not matter"
    assert session.forced == [letter["a"]] and not session.matcher.is_error(), "the session has not moved"
