"""Masks filled in threads are those filled one after another, and the faster way is used."""

from __future__ import annotations

import numpy as np
import pytest

from letter_tokenizer import END, TOKENIZER, oracle_matcher
from scripted import VOCAB
from slipstream.scheduler.grammar import mask_filler
from slipstream.scheduler.grammar.compiled import CompiledGrammar
from slipstream.scheduler.grammar.mask_filler import MaskFiller
from slipstream.scheduler.grammar.session import Session
from slipstream.structured_params import StructuredOutputsParams as Shape

WORDS = (VOCAB + 32) // 32
ROWS = 8


class Clock:
    """Filling one mask after another takes 1 ms each, threads take `threaded` seconds for all."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step = 0.001

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(mask_filler, "time", clock)
    return clock


def make_filler(num_threads=2):
    filler = MaskFiller(WORDS, VOCAB, lambda function: function())
    filler.num_threads = num_threads
    return filler


def sessions_of(grammar, texts=("", "a", "ab", "abc")):
    sessions = []
    for row in range(ROWS):
        tokens = TOKENIZER.encode(texts[row % len(texts)])
        sessions.append(Session(grammar, tokens, 0, [END], VOCAB))
        sessions[-1].catch_up()
    return [(session, row) for row, session in enumerate(sessions)]


def filled(filler, pending, budget=1.0):
    bits = np.zeros((ROWS, WORDS), np.uint32)
    filler.fill(pending, bits, budget)
    return bits


def count_threaded(filler, monkeypatch):
    """A list with an entry for each step in threads."""
    calls, fill = [], filler._fill_in_threads
    monkeypatch.setattr(filler, "_fill_in_threads", lambda *args: (calls.append(1), fill(*args)))
    return calls


def test_a_slow_grammar_is_compiled_for_each_thread_and_then_filled_in_threads(clock, monkeypatch):
    grammar = CompiledGrammar(lambda: oracle_matcher(Shape(regex="[a-d]{2,5}")))
    filler = make_filler()
    calls = count_threaded(filler, monkeypatch)
    shared = sessions_of(grammar)
    wanted = filled(filler, shared)
    assert wanted[0, END >> 5] >> (END & 31) & 1 == 0 and wanted[2, END >> 5] >> (END & 31) & 1 == 1
    assert np.array_equal(filled(filler, shared), wanted) and not calls, "they share a lexer"
    assert grammar.num_matchers == 2
    own = sessions_of(grammar)
    assert len({id(session.first) for session, _ in own}) == 2
    for _ in range(3 * mask_filler._STEPS_APART):
        assert np.array_equal(filled(filler, own), wanted)
    assert len(calls) > mask_filler._STEPS_APART


def test_threads_that_are_slower_are_left(clock, monkeypatch):
    grammar = CompiledGrammar(lambda: oracle_matcher(Shape(regex="[a-d]{2,5}")))
    grammar.grow(2)
    filler = make_filler()
    calls, pending = count_threaded(filler, monkeypatch), sessions_of(grammar)
    slow = filler._fill_in_threads

    def fill(*args):
        clock.step = 0.1
        slow(*args)
        clock.step = 0.001

    monkeypatch.setattr(filler, "_fill_in_threads", fill)
    for _ in range(mask_filler._STEPS_APART):
        filled(filler, pending)
    assert len(calls) == 1
    assert not any(session.is_slow for session, _ in pending)


def test_a_budget_that_threads_exceed_is_spent_one_by_one_next(clock, monkeypatch):
    """That finds the sessions that are slow."""
    grammar = CompiledGrammar(lambda: oracle_matcher(Shape(regex="[a-d]{2,5}")))
    grammar.grow(2)
    filler = make_filler()
    calls, pending = count_threaded(filler, monkeypatch), sessions_of(grammar)
    for _ in range(3):
        filled(filler, pending, budget=0.0005)
    assert len(calls) == 1 and all(session.is_slow for session, _ in pending)


def test_fast_masks_need_no_thread(clock, monkeypatch):
    clock.step = 1e-6
    grammar = CompiledGrammar(lambda: oracle_matcher(Shape(regex="[a-d]{2,5}")))
    grammar.grow(2)
    filler = make_filler()
    calls = count_threaded(filler, monkeypatch)
    for _ in range(3):
        filled(filler, sessions_of(grammar))
    assert not calls
