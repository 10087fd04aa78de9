"""Stages made of lists of ids: allowed ids, bias, bad words, requested logprobs. Each against plain Python."""

import numpy as np
import pytest
import torch
from sampling_harness import GREEDY, Harness, admission, make_plan

from slipstream.params.sampling import SamplingParams
from slipstream.runner.sampling.bias import LogitBias
from slipstream.runner.sampling.forbid import BadWords, MinTokens
from slipstream.runner.sampling.penalties import Penalties


def stage_of(harness, kind):
    return next(stage for stage in harness.sampler.stages if isinstance(stage, kind))


def prepared(harness, rows):
    return harness.sampler.prepare(make_plan(rows), capture=True)


def random_logits(rows, vocab, seed=0):
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab))


# allowed ids and bias


@pytest.mark.parametrize("vocab", [7, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bias_is_added_and_other_tokens_are_excluded(vocab, dtype):
    harness = Harness(6, vocab, dtype)
    params = [
        GREEDY.with_changes(logit_bias={0: 2.5, vocab - 1: -100.0}),
        GREEDY,
        GREEDY.with_changes(allowed_token_ids=[1, 3, 4]),
        GREEDY.with_changes(allowed_token_ids=[2, vocab - 1], logit_bias={2: 1.5, 5: 9.0}),
    ]
    rows = [3, 0, 4, 1]
    logits = random_logits(4, vocab).astype(np.float32).astype(np.float64)
    expected = logits.copy()
    expected[0, 0] += 2.5
    expected[0, vocab - 1] -= 100
    expected[2, [i for i in range(vocab) if i not in (1, 3, 4)]] = -np.inf
    expected[3, [i for i in range(vocab) if i not in (2, vocab - 1)]] = -np.inf
    expected[3, 2] += 1.5
    admitted = [admission(row, own) for row, own in zip(rows, params, strict=True)]
    for step in range(2):
        got = harness.edited(rows, [2 + step] * 4, logits, admitted)
        np.testing.assert_allclose(got, expected, rtol=1e-6 if dtype == torch.float32 else 1e-14)
        admitted = ()


def test_rows_without_lists_use_no_memory_and_lines_are_reused():
    harness = Harness(9, 50)
    bias, words = stage_of(harness, LogitBias), stage_of(harness, BadWords)
    harness.step([0, 1], [2, 2], np.zeros((2, 50)), [admission(0, GREEDY), admission(1, SamplingParams())])
    assert bias.table.tensor.shape[0] == 0 and words.words.tensor.numel() == 0
    params = GREEDY.with_changes(allowed_token_ids=[4])
    assert harness.step([2], [2], np.zeros((1, 50)), [admission(2, params)]).tokens.tolist() == [4]
    # another row, in the very step in which the entry was given back
    other = admission(3, GREEDY.with_changes(logit_bias={7: 1.0}))
    assert harness.step([3], [2], np.zeros((1, 50)), [other], released=[2]).tokens.tolist() == [7]
    assert bias.table.tensor.shape[0] == 4


def test_parameters_that_exclude_every_token_fail_their_row_only():
    params = GREEDY.with_changes(allowed_token_ids=[4], bad_words=["x"])
    admitted = [admission(0, params, bad_words=[[4]]), admission(1, GREEDY)]
    out = Harness(3, 9).step([0, 1], [2, 2], np.eye(9)[[4, 5]], admitted)
    assert out.failed.tolist() == [True, False] and out.tokens.tolist() == [0, 5]


# bad words


def forbidden(words, tokens):
    """Tokens that would complete a word now."""
    return {word[-1] for word in words if list(word[:-1]) == list(tokens[len(tokens) - len(word) + 1 :])}


WORDS = [
    [[3]],
    [[1, 2], [2, 1], [4, 4]],
    [[1, 1, 1], [5], [0, 2, 3, 1], [2, 3], [0, 3], [3, 3]],
    [[0, 1, 2, 3, 4, 5, 0, 1, 2]],
]


@pytest.mark.parametrize("vocab", [6, 100])
def test_a_bad_word_is_never_completed(vocab):
    """Few tokens matter, so that words begin all the time, across the prompt's end too."""
    rng = np.random.default_rng(vocab)
    harness = Harness(6, vocab)
    rows, params = [4, 0, 2, 1], GREEDY.with_changes(bad_words=["x"])
    prompts = [[1], [4, 4, 1], [0, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1]]
    tokens = [list(prompt) for prompt in prompts]
    hits = 0
    for step in range(60):
        admitted = []
        if step < 4:  # one after another, so that the tables grow in both directions under those already there
            admitted = [admission(rows[step], params, prompts[step], bad_words=WORDS[step])]
        live = range(min(step + 1, 4))
        logits = rng.normal(0, 1, (len(live), vocab))
        logits[:, :6] += 9
        expected = []
        for i in live:
            out = forbidden(WORDS[i], tokens[i])
            hits += int(logits[i].argmax()) in out
            expected.append(int(np.where([t in out for t in range(vocab)], -np.inf, logits[i]).argmax()))
        positions = [len(tokens[i]) for i in live]
        got = harness.step([rows[i] for i in live], positions, logits, admitted).tokens.tolist()
        assert got == expected
        for i in live:
            tokens[i].append(got[i])
    assert hits > 20


def test_output_before_a_preemption_counts_as_begun_words():
    params = GREEDY.with_changes(bad_words=["x"])
    back = admission(0, params, prompt=(9,), output=(1, 2), bad_words=[[1, 2, 3]])
    logits = np.eye(10)[[3]]
    assert np.isneginf(Harness(2, 10).edited([0], [3], logits, [back])[0, 3])
    other = admission(0, params, prompt=(9,), output=(2, 2), bad_words=[[1, 2, 3]])
    assert np.array_equal(Harness(2, 10).edited([0], [3], logits, [other]), logits)


def test_two_words_with_one_end_forbid_it_when_either_matches():
    params = GREEDY.with_changes(bad_words=["x"])
    for words in ([[1, 3], [2, 3]], [[2, 3], [1, 3]]):
        got = Harness(2, 10).edited([0], [2], np.zeros((1, 10)), [admission(0, params, (5, 1), bad_words=words)])
        assert np.flatnonzero(np.isneginf(got[0])).tolist() == [3]


def test_a_reused_line_has_no_words_of_its_last_row():
    harness = Harness(3, 10)
    params = GREEDY.with_changes(bad_words=["x"])
    harness.step([0], [2], np.zeros((1, 10)), [admission(0, params, (1, 2), bad_words=[[5], [2, 7, 1]])])
    new = admission(1, params, (3,), bad_words=[[0, 8]])
    assert np.array_equal(harness.edited([1], [1], np.zeros((1, 10)), [new], released=[0]), np.zeros((1, 10)))


def test_uploads_of_a_row_last_for_one_step():
    """For every kind of list, after any number of requests."""
    harness = Harness(3, 10)
    tables = [getattr(state, "ids", getattr(state, "words", state)) for state in harness.sampler._states]
    entries = [table.entries for table in tables if hasattr(table, "entries")]
    assert len(entries) == 5
    params = SamplingParams(
        temperature=0.0,
        bad_words=["x"],
        logit_bias={3: 1.0},
        logprob_token_ids=[1, 2],
        min_tokens=2,
        stop_token_ids=[4],
        repetition_penalty=1.1,
    )
    staged = set()
    for _ in range(5):
        harness.step([0], [2], np.zeros((1, 10)), [admission(0, params, (1, 2), bad_words=[[5]])], num_logprobs=1)
        harness.step([1], [2], np.zeros((1, 10)), [admission(1, GREEDY, (1, 2))], released=[0])
        harness.step([2], [2], np.zeros((1, 10)), [admission(2, GREEDY, (1, 2))], released=[1])
        staged.add(sum(len(each.staged._rows) for each in entries))
    assert len(staged) == 1


# logprobs of requested ids


def test_requested_ids_are_reported_from_the_raw_logits():
    harness = Harness(6, 50)
    params = [
        SamplingParams(temperature=0.5, logprob_token_ids=[7, 3]),
        GREEDY.with_changes(logprobs=1),
        GREEDY.with_changes(logprob_token_ids=[0, 49, 7, 8, 9], allowed_token_ids=[2], logprobs=2),
    ]
    logits = random_logits(3, 50)
    admitted = [admission(row, own) for row, own in zip([4, 0, 2], params, strict=True)]
    out = harness.step([4, 0, 2], [2] * 3, logits, admitted, num_logprobs=2)
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert out.requested.shape == (2, 5)
    np.testing.assert_allclose(out.requested[0, :2].numpy(), exact[0, [7, 3]], rtol=1e-12)
    np.testing.assert_allclose(out.requested[1].numpy(), exact[2, [0, 49, 7, 8, 9]], rtol=1e-12)
    assert harness.step([0], [3], logits[:1], num_logprobs=1).requested is None


class Guests:
    """Rows with lists are admitted and released; the lists are as many and as long as the bound allows if all are as
    long as the longest."""

    def __init__(self, num_rows, most, seed):
        self.rng = np.random.default_rng(seed)
        self.num_rows = num_rows
        self.most = most
        self.here = {}
        self._step = 0

    def move(self, make, size_of):
        """Released and admitted rows. `make` makes a list out of few or many numbers, of the size that `size_of`
        gives."""
        rng, here = self.rng, self.here
        many = self._step // 20 % 2 == 0
        self._step += 1
        released = [row for row in list(here) if rng.random() < (0.1 if many else 0.5)]
        for row in released:
            del here[row]
        came = []
        for row in set(range(self.num_rows)) - here.keys() - set(released):
            mine = make(rng, many)
            largest = np.max([size_of(mine), *map(size_of, here.values())], 0)
            if rng.random() < 0.4 and (not here or (len(here) + 1) * np.prod(largest) <= self.most):
                here[row] = mine
                came.append(row)
        return released, came


def test_requested_ids_stay_within_their_bound():
    """After any number of rows and any length of list."""
    most, vocab = 200, 97
    harness, guests = Harness(16, vocab, max_ids=most), Guests(16, most, 5)
    logits = random_logits(16, vocab)
    exact = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    sizes = set()
    for step in range(120):
        released, came = guests.move(
            lambda rng, many: rng.permutation(vocab)[: rng.choice([1, 2, 5] if many else [20, 50, vocab])].tolist(),
            lambda ids: [len(ids)],
        )
        here, rows = guests.here, sorted(guests.here)
        admitted = [admission(row, GREEDY.with_changes(logprob_token_ids=here[row])) for row in came]
        if not rows:
            harness.step([15], [2 + step], logits[15:], released=released)
            continue
        out = harness.step(rows, [2 + step] * len(rows), logits[rows], admitted, released=released, num_logprobs=0)
        for place, row in enumerate(rows):
            got = out.requested[place, : len(here[row])].numpy()
            np.testing.assert_allclose(got, exact[row, here[row]], rtol=1e-5)
        sizes.add(harness.sampler.requested.ids.tensor.numel())
    assert max(sizes) <= most and len(sizes) > 3


def test_stop_ids_stay_within_their_bound():
    most, vocab = 150, 60
    harness, guests = Harness(16, vocab, max_ids=most), Guests(16, most, 6)
    sizes = set()
    for _ in range(120):
        released, came = guests.move(
            lambda rng, many: rng.permutation(vocab)[: rng.choice([1, 3] if many else [20, vocab - 1])].tolist(),
            lambda ids: [len(ids)],
        )
        here, rows = guests.here, sorted(guests.here)
        params = GREEDY.with_changes(min_tokens=1000, max_tokens=None)
        admitted = [admission(row, params, stop_ids=here[row]) for row in came]
        if not rows:
            harness.step([15], [2], np.zeros((1, vocab)), released=released)
            continue
        got = harness.edited(rows, [2] * len(rows), np.zeros((len(rows), vocab)), admitted, released)
        for place, row in enumerate(rows):
            assert np.flatnonzero(np.isneginf(got[place])).tolist() == sorted(here[row])
        sizes.add(stage_of(harness, MinTokens).ids.tensor.numel())
    assert max(sizes) <= most and len(sizes) > 3


def test_bad_words_stay_within_their_bound():
    most, vocab = 240, 5
    harness, guests = Harness(17, vocab, max_ids=most), Guests(16, most, 7)  # the last row is the padding row
    texts, sizes, hits = {}, set(), 0

    def some_words(rng, many):
        if many:
            return [rng.integers(0, vocab, rng.choice([1, 2, 3])).tolist() for _ in range(rng.choice([1, 3]))]
        return [rng.integers(0, vocab, n).tolist() for n in [rng.choice([2, 9]), *[3] * int(rng.choice([1, 20]))]]

    for _ in range(120):
        released, came = guests.move(some_words, lambda words: [1 + len(words), max(map(len, words))])
        here, rows = guests.here, sorted(guests.here)
        texts |= {row: guests.rng.integers(0, vocab, 4).tolist() for row in came}
        params = GREEDY.with_changes(bad_words=["x"])
        admitted = [admission(row, params, texts[row], bad_words=here[row]) for row in came]
        if not rows:
            harness.step([15], [2], np.zeros((1, vocab)), released=released)
            continue
        logits = guests.rng.normal(0, 1, (len(rows), vocab))
        out = [forbidden(here[row], texts[row]) for row in rows]
        hits += sum(map(bool, out))
        wanted = np.where([[t in own for t in range(vocab)] for own in out], -np.inf, logits)
        got = harness.step(rows, [len(texts[row]) for row in rows], logits, admitted, released)
        for place, row in enumerate(rows):
            if len(out[place]) < vocab:
                assert int(got.tokens[place]) == wanted[place].argmax()
            texts[row].append(int(got.tokens[place]))
        sizes.add(stage_of(harness, BadWords).words.tensor.numel())
    assert max(sizes) <= most and len(sizes) > 3 and hits > 20


@pytest.mark.parametrize(
    ("params", "table"),
    [
        (GREEDY.with_changes(logit_bias={3: 1.0}), lambda harness: stage_of(harness, LogitBias).table),
        (GREEDY.with_changes(repetition_penalty=1.2), lambda harness: stage_of(harness, Penalties).counts),
        (GREEDY.with_changes(min_tokens=5), lambda harness: stage_of(harness, MinTokens).ids),
        (GREEDY.with_changes(bad_words=["x"]), lambda harness: stage_of(harness, BadWords).words),
    ],
)
def test_work_captured_with_one_table_is_not_replayed_with_another(params, table):
    harness = Harness(12, 50)
    known = {}
    for row in range(9):
        words = [[3] * (2 + row)] if params.bad_words else ()
        come = admission(row, params, stop_ids=range(2 + row), bad_words=words)
        harness.step([row], [2], np.zeros((1, 50)), [come])
        key = prepared(harness, [row]).key
        tensor = table(harness).tensor
        assert known.setdefault(key, tensor) is tensor
    assert len(known) > 1


def test_alternating_list_sizes_make_few_tables():
    harness = Harness(12, 300)
    params = GREEDY.with_changes(min_tokens=5)
    for turn in range(8):
        rows = range(1) if turn % 2 else range(9)
        come = [admission(row, params, stop_ids=range(200 if turn % 2 else 3)) for row in rows]
        harness.step(rows, [2] * len(rows), np.zeros((len(rows), 300)), come)
        harness.sampler.apply(make_plan([], released=rows))
    assert stage_of(harness, MinTokens).ids.number <= 2


def test_lists_that_come_to_the_bound_are_not_captured():
    """Each of their tables fits the present rows exactly, so there is no limit to their number."""
    most, vocab = 600, 200
    harness, guests, keys, eager = Harness(16, vocab, max_ids=most), Guests(16, most, 8), set(), 0
    for _ in range(200):
        released, came = guests.move(
            lambda rng, many: rng.permutation(vocab)[: rng.integers(20, 90) if many else rng.integers(1, vocab)],
            lambda ids: [len(ids)],
        )
        params = GREEDY.with_changes(min_tokens=1000, max_tokens=None)
        admitted = [admission(row, params, stop_ids=guests.here[row].tolist()) for row in came]
        rows = sorted(guests.here) or [15]
        harness.step(rows, [2] * len(rows), np.zeros((len(rows), vocab)), admitted, released)
        key = prepared(harness, rows).key
        if key is not None:
            keys.add(key)
        else:
            eager += 1
    assert eager > 50 and len(keys) <= 33


def test_captured_work_uses_no_lines_beyond_the_bound():
    """One row's long list is gathered for every row of a captured head."""
    harness = Harness(12, 300, max_ids=2000)
    come = [
        admission(row, GREEDY.with_changes(min_tokens=5 if row == 0 else 0), stop_ids=range(250)) for row in range(9)
    ]
    harness.step(range(9), [2] * 9, np.zeros((9, 300)), come)
    assert stage_of(harness, MinTokens).ids.shape == (4, 256)
    assert prepared(harness, [0, 1, 2]).key is not None
    assert prepared(harness, range(8)).key is None
    assert prepared(harness, range(1, 9)).key is not None, "a row without a list needs no room"
