"""Grammars with drafts, on a scripted device: the output is the one without drafts, right drafts save steps, and
forbidden drafts are not accepted."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from test_constraints import SHAPES, core_of, prompts, run, with_grammar

from letter_tokenizer import END, TOKENIZER, oracle_matcher
from scripted import VOCAB
from scripted_engine import submit, tokens_alone
from slipstream.scheduler.grammar.compiled import CompiledGrammar
from slipstream.scheduler.grammar.draft_masks import fill_along
from slipstream.scheduler.grammar.session import Session
from slipstream.structured_params import StructuredOutputsParams as Shape

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


def preempting(core: Any) -> None:
    """Preempt the youngest request before every fifth step."""
    step, numbers = core.step, itertools.count(1)

    def preempt_and_step() -> Any:
        running = core.scheduler._row_allocator.running
        if next(numbers) % 5 == 0 and running:
            core.scheduler._preempt(running[-1])
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
