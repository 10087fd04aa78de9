"""Threads advance grammars and fill masks as a matcher of llguidance does; matchers of ended requests are reused."""

from __future__ import annotations

import ctypes
import random
import threading

import numpy as np
import pytest
from test_constraints import SHAPES, core_of, prompts, run, with_grammar

from letter_tokenizer import END, TOKENIZER, oracle_matcher
from mask_gate import MaskGate
from patience import PATIENCE
from scripted_engine import submit, tokens_alone
from scripted_tokens import VOCAB
from slipstream.contracts.messages import Abort
from slipstream.contracts.request import FinishReason
from slipstream.contracts.step import StepMasks
from slipstream.params.structured import StructuredOutputsParams as Shape
from slipstream.scheduler.grammar import mask_pool
from slipstream.scheduler.grammar import mask_pool as pool_library
from slipstream.scheduler.grammar.mask_pool import MaskBatch, MaskPool
from slipstream.scheduler.grammar.native_matcher import GrammarVocabulary, NativeVocabulary
from slipstream.scheduler.grammar.session import MAX_USES, SLOW_SPAN, CompiledGrammar, Session
from slipstream.scheduler.grammar.translate import translate

__all__ = ["core_of"]  # a fixture

WORDS = (VOCAB + 32) // 32
VOCABULARY = NativeVocabulary(GrammarVocabulary(TOKENIZER, VOCAB), pool_library.load())  # type: ignore[arg-type]
LONG = "x" * 100  # more forced tokens than a row of the pool has room for

pytestmark = pytest.mark.skipif(pool_library.load() is None, reason="no C compiler")


def compiled(shape: Shape, max_spares: int = 0) -> CompiledGrammar:
    return CompiledGrammar(VOCABULARY.compile(translate(shape, {"<end>": END})), max_spares)


@pytest.fixture(params=[1, 3])
def pool(request):
    pool = MaskPool(pool_library.load(), WORDS, VOCAB, 16, num_threads=request.param)
    yield pool
    pool.close()


def batch_of(rows):
    """Of sessions, their tokens and the indices of their masks."""
    batch = MaskBatch()
    for row in rows:
        batch.add(*row)
    return batch


def oracle(session, matcher):
    """The mask and the forced tokens of the session's state, by a matcher that has taken the same tokens."""
    if session.is_complete or matcher.is_error():
        return None
    forced = matcher.compute_ff_tokens()
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32).copy()
    if mask[VOCAB >> 5] >> np.uint32(VOCAB & 31) & 1:
        mask[END >> 5] |= np.uint32(1 << (END & 31))
    return mask, forced


def test_masks_and_forced_tokens_are_those_of_an_untouched_matcher(pool):
    shapes = [*SHAPES, Shape(choice=[LONG, "y"]), Shape(regex="[a-c]*")] * 2
    rng = random.Random(0)
    sessions = [Session(compiled(shape), [], 0, [END], VOCAB) for shape in shapes]
    matchers = [oracle_matcher(shape) for shape in shapes]
    bits = np.zeros((len(shapes), WORDS), np.uint32)
    tokens, num_checked = [-1] * len(shapes), 0
    for _ in range(40):
        rows = [row for row, session in enumerate(sessions) if not session.is_complete]
        pool.start(batch_of((sessions[row], tokens[row], row) for row in rows), StepMasks(bits.view(np.int32)))
        pool.wait(bits, 1.0)
        for row in rows:
            session = sessions[row]
            wanted = oracle(session, matchers[row])
            if wanted is None:
                continue
            mask, forced = wanted
            assert session.forced == forced
            if session.forced:
                mask = np.zeros(WORDS, np.uint32)
                mask[forced[0] >> 5] = np.uint32(1 << (forced[0] & 31))
            assert np.array_equal(bits[row], mask), (shapes[row], session.num_taken)
            num_checked += 1
            allowed = np.flatnonzero(np.unpackbits(bits[row].view(np.uint8), bitorder="little"))
            tokens[row] = int(rng.choice([each for each in allowed if each < VOCAB and each != END] or [0]))
            matchers[row].consume_token(tokens[row])
    assert num_checked > 150 and any(session.is_complete for session in sessions)


def test_a_forced_text_is_tokenised_by_python_once(monkeypatch):
    source, calls = GrammarVocabulary(TOKENIZER, VOCAB), []
    monkeypatch.setattr(GrammarVocabulary, "__call__", lambda self, text: calls.append(text) or self._encode(text))
    vocabulary = NativeVocabulary(source, pool_library.load())
    matcher = vocabulary.compile(translate(Shape(regex="[ab]hello[ab]hello"), {}))
    for _ in range(3):
        for letter in "ab":
            copy = matcher.deep_copy()
            assert copy.consume_token(*TOKENIZER.encode(letter))
            assert copy.compute_ff_tokens() == TOKENIZER.encode("hello")
    assert sorted(calls) == [b"ahello", b"bhello"]  # with the text of the token before


def test_a_forbidden_token_gives_an_empty_mask(pool):
    session = Session(compiled(Shape(regex="[0-9]+")), [], 0, [END], VOCAB)
    bits = np.full((1, WORDS), 0xFFFFFFFF, np.uint32)
    pool.start(batch_of([(session, *TOKENIZER.encode("x"), 0)]), StepMasks(bits.view(np.int32)))
    pool.wait(bits, 1.0)
    assert not bits.any() and not session.is_complete and session.error


def test_a_second_mask_over_the_budget_makes_a_session_slow_until_one_is_in_time(pool):
    session = Session(compiled(Shape(regex="[0-9]+")), [], 0, [END], VOCAB)
    bits = np.zeros((1, WORDS), np.uint32)
    for num_tokens, budget, is_slow in ((1, 0.0, False), (SLOW_SPAN, 0.0, True), (1, 10.0, False), (20, 0.0, False)):
        session.num_taken += num_tokens
        pool.start(batch_of([(session, -1, 0)]), StepMasks(bits.view(np.int32)))
        pool.wait(bits, budget)
        assert session.is_slow is is_slow


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("ends", ["drawn", "aborted", "preempted"])
def test_a_late_mask_delays_no_other_row_and_changes_no_token(core_of, monkeypatch, depth, ends):
    gate = MaskGate(monkeypatch)
    core, messages = core_of(depth, num_pages=200), prompts(SHAPES)
    for message in messages:
        core.constraints.grammars.compile(message.params.structured_outputs).result()
    core.constraints.min_budget = 0.02
    core.submit(*messages, submit("p", [50, 3], max_tokens=30))
    (slow,) = core.scheduler._lifecycle.live["r1"]
    gate.matcher = slow.session.matcher.pointer
    found = {}

    def take(outputs):
        for output in outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
        core.scheduler.check()

    while set(core.scheduler._lifecycle.live) != {"r1"}:  # all others end
        take(core.step())
    assert gate.num_stopped == 1 and slow.session.is_busy
    assert found["p"] == tokens_alone(submit("p", [50, 3], max_tokens=30), 0)[0]
    if ends == "aborted":
        core.abort(Abort("r1"))
    elif ends == "preempted":
        take(core.drain())
        core.scheduler.preempt_all()
    gate.is_open.set()
    while core.has_requests():
        take(core.step())
    executor = core.executor.executor
    assert executor.num_sat_out >= 1
    for message in messages:
        wanted = with_grammar(message)[0][0]
        if ends == "aborted" and message.request_id == "r1":
            wanted = wanted[: len(found.get("r1", []))]
            found.setdefault("r1", [])
        assert found[message.request_id] == wanted


def test_a_grammar_that_ends_between_the_wait_and_the_masks_ends_its_request(core_of, monkeypatch):
    """The step of the next draw is launched when the thread takes the last token: that draw has no token to choose."""
    addresses, is_open = mask_pool.function_addresses(), threading.Event()
    consume = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32)
    real = consume(addresses[0])
    gated = consume(lambda matcher, token: is_open.wait(PATIENCE) and real(matcher, token))
    addresses[0] = ctypes.cast(gated, ctypes.c_void_p).value
    monkeypatch.setattr(mask_pool, "function_addresses", lambda: addresses)
    core, message = core_of(2, num_pages=40), submit("r", [5], structured_outputs=Shape(regex="[ab]"), max_tokens=9)
    core.constraints.grammars.compile(message.params.structured_outputs).result()
    core.submit(message, submit("p", [50, 3], max_tokens=12))
    (request,) = core.scheduler._lifecycle.live["r"]
    settle, were_late = core.constraints.settle, []
    # no wait for a mask but the first
    monkeypatch.setattr(core.constraints, "_time_left", lambda: None if request.session.num_taken == 1 else 0.0)

    def settle_and_open(requests):
        changed = settle(requests)
        if request in requests and request.session.is_busy:
            were_late.append(len(request.tokens))
            is_open.set()
            request.session.job.result()
        return changed

    monkeypatch.setattr(core.constraints, "settle", settle_and_open)
    ends = {}
    while core.has_requests():
        for output in core.step():
            ends[output.request_id] = output.finish_reason
        core.scheduler.check()
    assert were_late and ends == {"r": FinishReason.STOP, "p": FinishReason.LENGTH}
    assert TOKENIZER.decode(request.tokens[1:]) in ("a", "b")


class Counting:
    """A processor that allows all tokens, and records the number of output tokens at each call."""

    needs = "tokens"

    def __init__(self):
        self.calls = []

    def __call__(self, output):
        self.calls.append(len(output))
        return {}


@pytest.mark.every_second("depth", "has_processors", "num_checkpoints")
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("has_processors", "num_checkpoints"),
    [(False, None), (True, None), (False, 24)],
    ids=["plain", "processors", "recurrent"],
)
def test_masks_are_late_by_chance_and_no_token_changes(core_of, monkeypatch, depth, has_processors, num_checkpoints):
    """Rows sit out steps after prompts, decodes and forced tokens, some of them several in a row. The processors of a
    row that sits out do not run. Plans save states at borders that such rows have not reached."""
    dice = random.Random(depth)
    gate = MaskGate(monkeypatch, lambda matcher: dice.random() < 0.2)
    core = core_of(depth, num_pages=40, num_checkpoints=num_checkpoints)
    messages = prompts(SHAPES * 2, n=1 if has_processors else 2)
    if has_processors:
        for message in messages:
            message.params.logits_processors = [Counting()]
    core.constraints.min_budget = 0.0
    core.submit(*messages, submit("p", [50, 3], max_tokens=40))
    found = {}
    while core.has_requests():
        outputs = core.step()
        if dice.random() < 0.2:
            outputs += core.drain()
            if num_checkpoints is not None:
                pool, saved = core.scheduler.cache.states.pool, core.executor.executor.states.checkpoints
                found_ones = [number for number in range(num_checkpoints) if pool.hash_of(number)]
                assert all(saved[number] is not None for number in found_ones), "no state was saved there"
            if dice.random() < 0.5:
                core.scheduler.preempt_all()
        for output in outputs:
            found.setdefault((output.request_id, output.sample), []).extend(output.token_ids)
        core.scheduler.check()
        if dice.random() < 0.5:
            gate.let_pass()
    executor = core.executor.executor
    assert executor.num_sat_out > 5
    if num_checkpoints is not None:
        assert executor.states.num_saved > 5 and executor.states.num_restored > 5
    for message in messages:
        wanted = [tokens for tokens, _ in with_grammar(message)]
        assert [found[message.request_id, sample] for sample in range(len(wanted))] == wanted
        if has_processors:
            calls = message.params.logits_processors[0].calls
            assert calls == sorted(calls) and set(range(len(wanted[0]))) <= set(calls)


def test_the_matcher_of_an_ended_session_is_used_again_but_not_forever():
    grammar = compiled(Shape(regex="[a-c]{2}x"), max_spares=1)
    used = []
    for _ in range(MAX_USES + 1):
        session = Session(grammar, TOKENIZER.encode("ab"), 0, [END], VOCAB)
        session.catch_up()
        assert session.forced == TOKENIZER.encode("x")
        used.append(session.matcher)
        session.close()
    assert all(matcher is used[0] for matcher in used[:-1]) and used[-1] is not used[0]
    failed = Session(grammar, TOKENIZER.encode("zz"), 0, [END], VOCAB)
    failed.catch_up()
    failed.close()
    assert not Session(grammar, [], 0, [END], VOCAB).error


@pytest.mark.parametrize("kind", ["threads", "no library"])
def test_tokens_do_not_depend_on_who_fills_the_masks(core_of, monkeypatch, kind):
    if kind == "threads":
        monkeypatch.setattr(mask_pool, "default_threads", lambda: 2)
    else:
        monkeypatch.setattr(pool_library, "load", lambda: None)
    core, messages = core_of(1), prompts(SHAPES, n=2)
    core.submit(*messages)
    found = run(core)
    assert (core.constraints._pool is None) == (kind == "no library")
    for message in messages:
        assert [found[message.request_id, sample][:2] for sample in range(2)] == with_grammar(message)
