"""LogprobList: a list of dicts for readers, kept as bytes until it is read."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import struct

import msgspec
import numpy as np
import pytest

from slipstream import LLM, SamplingParams
from slipstream.contracts.messages import LOGPROB
from slipstream.front import results as module
from slipstream.front.results import Logprob, LogprobList, LogprobStore
from tiny import write_tiny

NUM, EACH = 9, 4
TOKENS = np.random.default_rng(1).integers(0, 50, (NUM, EACH))
VALUES = -np.random.default_rng(2).random((NUM, EACH))
SIZE = EACH * LOGPROB.itemsize
DATA = np.array(
    [(value, token, place % EACH) for place, (value, token) in enumerate(zip(VALUES.flat, TOKENS.flat, strict=True))],
    LOGPROB,
).tobytes()


def text_of(token: int) -> str:
    return f"<{token}>"


def a_store(texts=text_of) -> LogprobStore:
    store = LogprobStore(EACH, texts)
    store.take(DATA)
    return store


def as_list(texts=text_of) -> list[dict[int, Logprob]]:
    """What they are, made at once: of the same token the first counts."""
    entries = []
    for tokens, values in zip(TOKENS.tolist(), VALUES.tolist(), strict=True):
        entry = {}
        for rank, (token, value) in enumerate(zip(tokens, values, strict=True)):
            entry.setdefault(token, Logprob(value, rank or None, texts(token)))
        entries.append(entry)
    return entries


def both() -> list[tuple[LogprobList, list]]:
    """Of a text, and of a prompt, whose first token has none."""
    return [
        (LogprobList(a_store(), range(NUM)), as_list()),
        (LogprobList(a_store(), range(-1, NUM)), [None, *as_list()]),
        (LogprobList(a_store(), range(0)), []),
        (LogprobList(LogprobStore(EACH, text_of), range(-1, 0)), [None]),
    ]


def pickled(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301  # our own


def test_they_read_as_a_list():
    for lazy, plain in both():
        assert len(lazy) == len(plain) and bool(lazy) == bool(plain)
        assert [lazy[i] for i in range(-len(plain), len(plain))] == [plain[i] for i in range(-len(plain), len(plain))]
        assert list(lazy) == plain and list(reversed(lazy)) == plain[::-1]
        assert lazy == plain and plain == lazy and lazy == lazy[:]
        assert repr(lazy) == repr(plain)
        for wrong in (len(plain), -len(plain) - 1):
            with pytest.raises(IndexError):
                lazy[wrong]
        with pytest.raises(TypeError):
            hash(lazy)


def test_the_order_within_an_entry_is_kept():
    for entry, plain in zip(LogprobList(a_store(), range(NUM)), as_list(), strict=True):
        assert list(entry.items()) == list(plain.items())


def test_slices_are_slices():
    ends = [None, -20, -4, -1, 0, 1, 3, 9, 30]
    for lazy, plain in both():
        for start, stop, step in itertools.product(ends, ends, [None, 1, 2, -1, -3]):
            assert lazy[start:stop:step] == plain[start:stop:step]
        assert lazy[1:][1:] == plain[1:][1:]


def test_what_differs_is_not_equal():
    lazy, plain = both()[0]
    other = as_list()
    other[3] = {1: Logprob(-1.0)}
    assert lazy != other and lazy != plain[:-1] and lazy != tuple(plain) and lazy != "x" and lazy is not None
    assert lazy != LogprobList(a_store(lambda token: None), range(NUM))


def test_an_entry_is_made_once_and_shared_by_slices():
    lazy = LogprobList(a_store(), range(NUM))
    assert lazy[2] is lazy[2] is lazy[1:][1] is next(iter(lazy[2:])) is copy.copy(lazy)[2]


def test_together_with_others_they_make_a_list():
    for lazy, plain in both():
        assert lazy + [None] == [*plain, None] and [None] + lazy == [None, *plain] and lazy + lazy == plain + plain
        assert type(lazy + []) is list
        merged = [None]
        merged += lazy
        assert merged == [None, *plain]
        with pytest.raises(TypeError):
            lazy + (1,)


def test_they_pickle_and_copy_with_the_texts_of_their_tokens_and_no_tokenizer():
    for lazy, plain in both():
        for part in (slice(None), slice(2, 5), slice(None, None, -2), slice(4, 4), slice(0, 1)):
            some = lazy[part]
            list(some[:1])  # one of them has been looked at
            for again in (pickled(some), copy.deepcopy(some), copy.copy(some)):
                assert type(again) is LogprobList and again == plain[part]
                assert pickled(again) == plain[part]
    none = LogprobList(a_store(lambda token: None), range(NUM))
    assert pickled(none) == as_list(lambda token: None)
    assert len(pickle.dumps(none[:2])) < len(pickle.dumps(none))


def test_a_deep_copy_is_its_own():
    lazy = LogprobList(a_store(), range(NUM))
    own = lazy[0]
    again = copy.deepcopy(lazy)
    again[0].clear()
    assert own and lazy == as_list()


def test_msgspec_writes_them_as_lists_with_an_enc_hook():
    lazy, plain = both()[1]
    assert msgspec.json.encode(lazy, enc_hook=list) == msgspec.json.encode(plain)


def test_what_was_handed_out_stays_while_more_comes():
    store = LogprobStore(EACH, text_of)
    seen = []
    for place in range(NUM):
        store.take(DATA[place * SIZE : (place + 1) * SIZE])
        seen.append(LogprobList(store, range(len(store))))
        entries = iter(seen[-1])  # an unfinished reader does not block others
        next(entries)
    assert [list(each) for each in seen] == [as_list()[: place + 1] for place in range(NUM)]


def test_the_sum_is_that_of_the_tokens_one_after_another():
    store = LogprobStore(EACH, text_of)
    assert store.cumulative() == 0.0
    total = 0.0
    for start, stop in [(0, 1), (1, 4), (4, 9)]:
        store.take(DATA[start * SIZE : stop * SIZE])
        for value in VALUES[start:stop, 0].tolist():
            total += value
        assert store.cumulative() == store.cumulative() == total
    store.take(np.array([(-math.inf, 1, 1)] * EACH, LOGPROB).tobytes())
    assert store.cumulative() == -math.inf


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "llama")
    with LLM(str(folder), use_tqdm_on_load=False, max_model_len=64, num_pages=64, page_size=4, num_threads=1) as llm:
        yield llm


@pytest.fixture
def made(monkeypatch):
    """Every Logprob that is made from here on."""
    objects: list[Logprob] = []

    def counted(*args):
        objects.append(Logprob(*args))
        return objects[-1]

    monkeypatch.setattr(module, "Logprob", counted)
    return objects


ASKING = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2, n=2)


def test_logprobs_that_are_not_read_are_never_built(llm, made, monkeypatch):
    decoded = []
    monkeypatch.setattr(llm.tokenizer, "text_of", lambda token: decoded.append(token) or str(token))
    results = llm.generate(["abc", "defg"], ASKING, use_tqdm=False)
    assert all(sample.cumulative_logprob < 0 and len(sample.logprobs) == 6 for r in results for sample in r.outputs)
    for result in llm.stream("abc", ASKING):
        assert len(result.prompt_logprobs) == 3 and result.prompt_logprobs[0] is None
    assert not made and not decoded
    entry = results[1].outputs[1].logprobs[4]
    assert list(entry.values()) == made and len(made) == 3  # the likeliest was chosen
    assert decoded == list(entry)


def test_texts_are_those_of_the_tokens_also_after_the_end(llm):
    (result,) = llm.generate("abc", ASKING, use_tqdm=False)
    told = [*result.outputs[0].logprobs, *result.prompt_logprobs[1:]]
    whole = [(token, p.decoded_token) for entry in told for token, p in entry.items() if token < 128]
    assert whole and all(text == llm.tokenizer.text_of(token) for token, text in whole)
    tokens = result.outputs[0].token_ids + result.prompt_token_ids[1:]
    assert [next(iter(entry)) for entry in told] == tokens


def split_store(tokens, others=()):
    """Tokens are bytes; each entry also has the other tokens."""
    store = LogprobStore(1 + len(others), lambda token: bytes([token]).decode(errors="replace"), lambda t: bytes([t]))
    for token in tokens:
        store.take(b"".join(struct.pack("<dii", -1.0, each, 1) for each in (token, *others)))
    return store


def texts_of_tokens(store):
    return [[each.decoded_token for each in store.entry(index).values()] for index in range(len(store))]


def test_the_token_that_completes_a_character_has_its_text():
    tokens = [*"aé🙂b".encode(), 0x82, ord("c"), 0xE2]
    texts = [own for (own,) in texts_of_tokens(split_store(tokens))]
    assert texts == ["a", "", "é", "", "", "", "🙂", "b", "", "c", ""]
    # of tokens that were not drawn: what they would have completed
    assert texts_of_tokens(split_store("éa".encode(), others=[0xA8, 0xFF])) == [
        ["", "", ""],
        ["é", "è", ""],
        ["a", "", ""],
    ]
    assert pickled(LogprobList(split_store(tokens), range(2, 7)))[4] == split_store(tokens).entry(6)


def test_results_are_equal_and_survive_pickling(llm):
    (one,), (other,) = (llm.generate("abc", ASKING, use_tqdm=False) for _ in range(2))
    assert one.outputs == other.outputs and one.prompt_logprobs == other.prompt_logprobs
    again = pickled(one)
    assert again == one and again.outputs[0].logprobs[0] == other.outputs[0].logprobs[0]
