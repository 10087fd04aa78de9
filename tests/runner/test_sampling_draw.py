"""The draw: the exact distribution in any batch; and rows with bad logits."""

import math

import numpy as np
import pytest
import torch
from sampling_harness import GREEDY, Harness, admission, penalized, softmax, truncated

from sampling_values import TRUNCATIONS
from slipstream.ops.sampling import reference
from slipstream.params.sampling import SamplingParams

EVERYTHING = SamplingParams(
    temperature=1.2, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2,
    frequency_penalty=0.3, min_tokens=3,
)  # fmt: skip


def critical(dof, sigmas=4.0):
    """Wilson and Hilferty's cube: the value a chi-square exceeds once in about 30,000 times."""
    return dof * (1 - 2 / (9 * dof) + sigmas * math.sqrt(2 / (9 * dof))) ** 3


def check_distribution(tokens, probabilities):
    """Chi-square over tokens; those expected fewer than five times are counted together."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), "a token was drawn that truncation had removed"
    expected = probabilities * len(tokens)
    often = expected >= 5
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1)).sum()
    assert statistic < critical(len(expected) - 1), statistic


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.5),
    *(SamplingParams(**{name: value}) for name, value in TRUNCATIONS.items()),
    SamplingParams(temperature=1.7, top_k=9, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize(("vocab", "dtype"), [(7, torch.float64), (100, torch.float32)])
def test_token_frequencies_match_their_probabilities(params, vocab, dtype):
    num = 6000
    logits = np.random.default_rng(vocab).normal(0, 1.5, vocab)
    harness = Harness(2, vocab, dtype)
    tokens = harness.step(
        [0] * num, range(2, num + 2), np.repeat(logits[None], num, 0), [admission(0, params, seed=11)]
    ).tokens.numpy()
    check_distribution(tokens, softmax(truncated(logits, params)))


@pytest.mark.parametrize("along", ["seeds", "samples"])
def test_token_frequencies_match_along_positions(along):
    num, vocab = 4000, 20
    logits = np.random.default_rng(5).normal(0, 1, vocab)
    admitted = [
        admission(row, SamplingParams(), **({"seed": row} if along == "seeds" else {"sample": row}))
        for row in range(num)
    ]
    tokens = Harness(num + 1, vocab).step(range(num), [2] * num, np.repeat(logits[None], num, 0), admitted).tokens
    check_distribution(tokens.numpy(), softmax(logits))


def test_unlikely_tokens_are_drawn_too():
    """A token of probability 1/2000 beside one that has nearly all of it, in float32."""
    num = 40000
    logits = np.log(np.array([1 - 2 / 2000, 1 / 2000, 1 / 2000]))
    harness = Harness(2, 3, torch.float32)
    tokens = harness.step(
        [0] * num, range(num), np.repeat(logits[None], num, 0), [admission(0, SamplingParams())]
    ).tokens
    check_distribution(tokens.numpy(), np.exp(logits))


def test_positions_are_independent():
    num, vocab = 8000, 8
    tokens = (
        Harness(2, vocab)
        .step([0] * num, range(num), np.zeros((num, vocab)), [admission(0, SamplingParams(), seed=3)])
        .tokens.numpy()
    )
    for lag in (1, 2, 5):
        pairs = np.bincount(tokens[lag:] * vocab + tokens[:-lag], minlength=vocab * vocab)
        expected = (num - lag) / vocab**2
        assert ((pairs - expected) ** 2 / expected).sum() < critical(vocab**2 - 1)


@pytest.mark.parametrize("other", [{"seed": 1}, {"sample": 1}, {"seed": 2**63}, {"seed": 2**32}])
def test_samples_and_seeds_are_independent(other):
    num, vocab = 8000, 8
    harness = Harness(3, vocab)
    admitted = [admission(0, SamplingParams()), admission(1, SamplingParams(), **other)]
    tokens = harness.step(
        [0] * num + [1] * num, [*range(num), *range(num)], np.zeros((2 * num, vocab)), admitted
    ).tokens.numpy()
    pairs = np.bincount(tokens[:num] * vocab + tokens[num:], minlength=vocab * vocab)
    expected = num / vocab**2
    assert ((pairs - expected) ** 2 / expected).sum() < critical(vocab**2 - 1)


MANY = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(top_k=20),
    SamplingParams(min_p=0.1),
    SamplingParams(repetition_penalty=1.3, temperature=0.9),
    EVERYTHING,
]


def run_alone_or_together(groups, vocab, num_steps, rows):
    """Tokens of each request when these groups of requests run, each group in a sampler of its own."""
    texts: dict[int, list[int]] = {}
    table = np.random.default_rng(8).normal(0, 2, (50, vocab))
    for group in groups:
        harness = Harness(len(MANY) + 1, vocab)
        admitted = [
            admission(rows[i], MANY[i], prompt=(1, 2, i), seed=77, sample=i % 2, stop_ids=(0, 3)) for i in group
        ]
        for i in group:
            texts[i] = []
        for step in range(num_steps):
            logits = np.stack([table[(7 * i + step + sum(texts[i])) % 50] for i in group])
            tokens = harness.step([rows[i] for i in group], [3 + step] * len(group), logits, admitted).tokens
            for i, token in zip(group, tokens.tolist(), strict=True):
                texts[i].append(token)
            admitted = []
    return texts


@pytest.mark.parametrize("vocab", [7, 100, 1000])
def test_draws_do_not_depend_on_the_batch_or_the_row(vocab):
    num = len(MANY)
    alone = run_alone_or_together([[i] for i in range(num)], vocab, 12, list(range(num)))
    together = run_alone_or_together([list(range(num))], vocab, 12, [3, 0, 6, 1, 5, 2, 4])
    pairs = run_alone_or_together([[6, 0], [1, 4], [5, 3, 2]], vocab, 12, list(range(num)))
    assert alone == together == pairs
    assert len({tuple(text) for text in alone.values()}) == num


def test_a_position_gives_the_same_token_after_a_preemption():
    vocab = 100
    table = np.random.default_rng(9).normal(0, 2, (20, vocab))
    params = SamplingParams(frequency_penalty=0.7, temperature=1.1)
    whole = Harness(2, vocab)
    output: list[int] = []
    for step in range(8):
        admitted = [admission(0, params, prompt=(5, 6), seed=4)] if step == 0 else []
        output += whole.step([0], [2 + step], table[step : step + 1], admitted).tokens.tolist()
    resumed = Harness(4, vocab)
    again = output[:5]
    for step in range(5, 8):
        admitted = [admission(2, params, prompt=(5, 6), output=again, seed=4)] if step == 5 else []
        again = again + resumed.step([2], [2 + step], table[step : step + 1], admitted).tokens.tolist()
    assert again == output


def test_greedy_and_random_rows_mix():
    logits = np.random.default_rng(2).normal(0, 2, (6, 100))
    params = [GREEDY, SamplingParams(), GREEDY, SamplingParams(), SamplingParams(), SamplingParams(temperature=9e-6)]
    admitted = [admission(row, own, seed=row) for row, own in enumerate(params)]
    tokens = Harness(7, 100).step(range(6), [2] * 6, logits, admitted).tokens.tolist()
    for row in (0, 2, 5):
        assert tokens[row] == logits[row].argmax()
    for row in (1, 3, 4):
        alone = Harness(7, 100).step([row], [2], logits[row : row + 1], [admitted[row]]).tokens.tolist()
        assert alone == [tokens[row]]


def test_noise_is_made_for_random_rows_only(monkeypatch):
    shapes = []
    original = reference.noisy
    monkeypatch.setattr(reference, "noisy", lambda logits, keys: shapes.append(len(logits)) or original(logits, keys))
    harness = Harness(4, 7)
    harness.step([0, 1], [2, 2], np.zeros((2, 7)), [admission(0, GREEDY), admission(1, GREEDY)])
    assert shapes == []
    harness.step([0, 1, 2], [3, 3, 2], np.zeros((3, 7)), [admission(2, SamplingParams())])
    harness.step([2], [3], np.zeros((1, 7)))
    assert shapes == [1, 1]


def test_greedy_takes_the_first_of_equals():
    logits = np.zeros((1, 1000))
    logits[0, [17, 400, 999]] = 2.0
    assert Harness(2, 1000).step([0], [2], logits, [admission(0, GREEDY)]).tokens.tolist() == [17]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), EVERYTHING])
def test_nan_fails_its_row_only(params):
    logits = np.random.default_rng(1).normal(0, 1, (3, 100))
    admitted = [admission(row, params, seed=row, stop_ids=(5,)) for row in range(3)]
    clean = Harness(4, 100).step([0, 1, 2], [2] * 3, logits, admitted)
    assert clean.failed.tolist() == [False, False, False]
    logits[1, 60] = np.nan
    out = Harness(4, 100).step([0, 1, 2], [2] * 3, logits, admitted, num_logprobs=2)
    assert out.failed.tolist() == [False, True, False]
    assert out.tokens[1] == 0
    assert out.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


@pytest.mark.parametrize("params", [GREEDY, *PARAMS, EVERYTHING], ids=str)
def test_a_row_with_nothing_left_fails_with_token_0(params):
    out = Harness(2, 100).step([0], [2], np.full((1, 100), -np.inf), [admission(0, params, stop_ids=(1,))])
    assert out.tokens.tolist() == [0]
    assert out.failed.tolist() == [True]


@pytest.mark.parametrize("params", [GREEDY, *PARAMS, EVERYTHING], ids=str)
def test_an_infinite_logit_wins(params):
    logits = np.zeros((1, 100))
    logits[0, 42] = np.inf
    assert Harness(2, 100).step([0], [2], logits, [admission(0, params, stop_ids=(1,))]).tokens.tolist() == [42]


@pytest.mark.parametrize("captures", [False, True])
def test_padding_rows_change_nothing(captures):
    """A batch may be longer than the plan; the rest are padding rows."""
    vocab = 100
    logits = torch.as_tensor(np.random.default_rng(6).normal(0, 2, (4, vocab)))
    for num in (1, 2):
        admitted = [admission(0, EVERYTHING, stop_ids=(3,)), admission(1, SamplingParams(top_p=0.8))][:num]
        plain = Harness(3, vocab).step(range(num), [2] * num, logits[:num].numpy(), admitted)
        padded = Harness(3, vocab, captures=captures)
        original = padded.sampler.prepare

        def prepare(plan, original=original, num=num, **options):
            sample = original(plan, **options)
            assert (sample.key is not None) == options["capture"]

            class Longer:
                indices = sample.indices

                def __call__(self, own, batch, indices):
                    pad = 4 - num
                    rows = torch.cat([batch.rows, torch.full((pad,), 2)])
                    positions = torch.cat([batch.positions, torch.zeros(pad, dtype=torch.int64)])
                    return sample(logits.clone(), type(batch)(rows, positions), indices)

            return Longer()

        padded.sampler.prepare = prepare
        out = padded.step(range(num), [2] * num, logits[:num].numpy(), admitted, num_logprobs=1)
        assert out.tokens[:num].tolist() == plain.tokens.tolist()
        assert out.tokens.shape == (4,)


def test_all_stages_together_match_the_reference():
    """Greedy, so that the order of the stages shows: min_tokens and penalties change which token is best."""
    params = SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=0.5, min_tokens=2)
    rng = np.random.default_rng(12)
    harness = Harness(2, 100)
    output: list[int] = []
    for step in range(6):
        logits = rng.normal(0, 2, 100)
        logits[[4, 9]] += 6
        expected = logits.copy()
        if step < 2:
            expected[9] = -np.inf
        expected = penalized(expected, (4,), output, params)
        admitted = [admission(0, params, prompt=(4,), stop_ids=(9,))] if step == 0 else []
        output += harness.step([0], [1 + step], logits[None], admitted).tokens.tolist()
        assert output[-1] == expected.argmax()
