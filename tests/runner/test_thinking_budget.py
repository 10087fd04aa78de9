"""The thinking budget: the device ends reasoning after exactly so many tokens, for any markers and any tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from runner.sampling_harness import Harness, admission
from slipstream.contracts.step import DrawEdits
from slipstream.params.sampling import SamplingParams
from slipstream.params.thinking import Thinking, ThinkingAutomaton

VOCAB = 40


def written(wanted, thinking, budget):
    """What a row writes that wants these tokens, by the definition: one token at a time, over the whole text."""
    text: list[int] = []
    begin = 0 if thinking.is_open else None  # where the reasoning begins that is not ended
    used = 0  # reasoning tokens of earlier parts
    since = 0  # tokens before this one are part of an earlier marker
    rest: list[int] = []  # of the forced text
    for token in wanted:
        if not rest and begin is not None and used + len(text) - begin >= budget:
            own = text[max(begin, since) :]
            forced = list(thinking.forced)
            known = max(num for num in range(len(forced)) if own[len(own) - num :] == forced[:num])
            rest = forced[known:]
        if rest:
            text.append(rest.pop(0))
            if not rest:
                begin, since, used = None, len(text), budget
            continue
        text.append(token)
        markers = thinking.start if begin is None else thinking.end
        ended = [each for each in markers if len(text) - since >= len(each) and text[-len(each) :] == list(each)]
        if ended:
            if begin is None:
                begin = len(text)
            else:
                used += len(text) - begin - max(map(len, ended))
                begin = None
            since = len(text)
    return text


def markers(source, letters):
    def one(longest):
        return tuple(source.randrange(letters) for _ in range(source.randint(1, longest)))

    start = tuple({one(3) for _ in range(source.randint(1, 2))})
    end = tuple({one(4) for _ in range(source.randint(1, 2))})
    forced = source.choice([end[0], one(3) + end[0], end[0] + one(3), one(5)])
    return start, end, forced


@pytest.mark.parametrize("seed", range(12))
def test_rows_write_what_the_definition_says(seed):
    """Several rows with budgets, one without; rows come back after a preemption at any token."""
    source = random.Random(seed)
    letters = source.choice([2, 3, 6])
    start, end, forced = markers(source, letters)
    harness = Harness(6, VOCAB)
    rows = []
    for row in range(4):
        budget = source.choice([0, 1, 3, 8, 20])
        thinking = Thinking(start, end, forced, source.random() < 0.5)
        wanted = [source.randrange(letters + 1) for _ in range(60)]
        rows.append((row, SamplingParams(temperature=0, thinking_token_budget=budget), thinking, wanted, []))
    plain = [source.randrange(letters) for _ in range(60)]
    seen = []

    def admit(row, params, thinking, output):
        return replace(admission(row, params, prompt=(9, 9), output=output), thinking=thinking)

    for step in range(60):
        admitted, released = [], []
        for row, params, thinking, _, output in rows:
            if not step or source.random() < 0.05:
                released += [row] if step else []
                admitted.append(admit(row, params, thinking, output))
        if not step:
            admitted.append(admission(4, SamplingParams(temperature=0)))
        logits = np.zeros((5, VOCAB))
        for row, *_, wanted, _ in rows:
            logits[row, wanted[step]] = 5.0
        logits[4, plain[step]] = 5.0
        drawn = harness.step([0, 1, 2, 3, 4], [2 + step] * 5, logits, admitted, released).tokens.tolist()
        for row, *_, output in rows:
            output.append(drawn[row])
        seen.append(drawn[4])
    for _, params, thinking, wanted, output in rows:
        assert output == written(wanted, thinking, params.thinking_token_budget)
    assert seen == plain


def test_a_budget_is_exact():
    thinking = Thinking(((1,),), ((2,),), (2,), True)
    wanted = [7, 7, 7, 7, 7, 7, 1, 7, 2, 7, 1, 7, 7]
    assert written(wanted, thinking, 4) == [7, 7, 7, 7, 2, 7, 1, 2, 2, 7, 1, 2, 7]
    assert written(wanted, thinking, 5) == [7, 7, 7, 7, 7, 2, 1, 2, 2, 7, 1, 2, 7]
    assert written(wanted, thinking, 100) == wanted
    # what the model has begun to write of the marker is continued, and text around the marker is written whole
    long = Thinking(((1,),), ((2, 3, 4),), (2, 3, 4), True)
    assert written([7, 2, 7, 7, 7, 7], long, 2) == [7, 2, 3, 4, 7, 7]
    around = Thinking(((1,),), ((4,),), (3, 4, 5), True)
    assert written([7, 7, 7, 7, 7, 7], around, 1) == [7, 3, 4, 5, 7, 7]


def test_a_row_forgets_the_text_that_its_last_request_was_forced_to_write():
    """The first request ends within the forced text. The next one in its row has no budget, and another row has."""
    thinking = Thinking(((1,),), ((4,),), (3, 4, 5), True)
    harness = Harness(3, VOCAB)
    logits = np.zeros((2, VOCAB))
    logits[:, 7] = 5.0

    def budget(row, num):
        params = SamplingParams(temperature=0, thinking_token_budget=num)
        return replace(admission(row, params, prompt=(9, 9)), thinking=thinking)

    assert harness.step([0, 1], [2, 2], logits, [budget(0, 0), budget(1, 20)]).tokens.tolist() == [3, 7]
    plain = admission(0, SamplingParams(temperature=0))
    assert harness.step([0, 1], [2, 3], logits, [plain], [0]).tokens.tolist() == [7, 7]


@pytest.mark.parametrize("captures", [False, True])
def test_a_forced_token_waits_until_the_grammar_allows_it(captures):
    thinking = Thinking(((1,),), ((3,),), (3,), True)
    params = SamplingParams(temperature=0, thinking_token_budget=0, structured_outputs={"regex": "a"})
    harness = Harness(3, VOCAB, captures=captures)
    admitted, drawn = [replace(admission(0, params, prompt=(9, 9)), thinking=thinking)], []
    for step, allowed in enumerate(([7], [7, 3], [7, 3])):
        bits = np.zeros((1, 2), np.int32)
        bits[0, 0] = sum(1 << token for token in allowed)
        late = DrawEdits(np.array([0], np.int32), bits)
        out = harness.step([0], [2 + step], np.eye(VOCAB)[[7]], admitted, late=late)
        assert not out.failed.any()
        drawn += out.tokens.tolist()
        admitted = []
    assert drawn == [7, 3, 7]


@pytest.mark.parametrize("seed", range(20))
def test_the_host_follows_known_tokens_as_the_device_does(seed):
    """`follow` skips tokens of no marker; step by step it gives the same."""
    source = random.Random(seed)
    start, end, forced = markers(source, 3)
    automaton = ThinkingAutomaton(Thinking(start, end, forced, False))
    tokens = [source.choice([0, 1, 2, 30, 31]) for _ in range(200)]
    budget = source.choice([0, 2, 50])
    state, count = automaton.first_inside, 0
    for num, token in enumerate(tokens):
        assert automaton.follow(automaton.first_inside, 0, budget, tokens[:num]) == (state, count)
        is_forced = automaton.is_forcing[state] or (automaton.is_inside[state] and count >= budget)
        if is_forced and token == automaton.forced[state]:
            state = int(automaton.next_forced[state])
        else:
            found = np.flatnonzero(automaton.tokens == token)
            column = int(found[0]) if len(found) else -1
            state, count = int(automaton.next[state, column]), count + int(automaton.delta[state, column])


@pytest.mark.cuda
def test_a_gpu_writes_the_same():
    from slipstream.device.device import open_device

    source = random.Random(5)
    thinking = Thinking(((1, 2),), ((3,), (4, 5)), (6, 4, 5), True)
    wanted = [source.randrange(8) for _ in range(40)]
    params = SamplingParams(temperature=0, thinking_token_budget=6)
    harness = Harness(3, VOCAB, dtype=torch.float32, device=open_device("cuda", 0, 1))
    found = []
    for step, token in enumerate(wanted):
        logits = torch.zeros(1, VOCAB, device="cuda")
        logits[0, token] = 5.0
        admitted = [] if step else [replace(admission(0, params, prompt=(9, 9)), thinking=thinking)]
        found += harness.step([0], [2 + step], lambda batch: logits, admitted).tokens.tolist()  # noqa: B023
    assert found == written(wanted, thinking, 6)
