"""Each stage against plain Python, on odd shapes, in batches with and without other rows that use it."""

import numpy as np
import pytest
import torch
from sampling_harness import GREEDY, Harness, admission, make_plan, penalized, truncated

from sampling_values import TRUNCATIONS as VALUES
from slipstream.params.sampling import SamplingParams
from slipstream.runner.sampling.forbid import MinTokens
from slipstream.runner.sampling.penalties import Penalties
from slipstream.runner.sampling.stage import DrawBatch, Stage, StageWork

VOCABULARIES = [7, 100, 1000]
NULL = 5  # the last of six rows


def stage_of(harness, kind):
    return next(stage for stage in harness.sampler.stages if isinstance(stage, kind))


def random_logits(rng, rows, vocab):
    return rng.normal(0, 3, (rows, vocab))


# min_tokens


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_stop_ids_are_excluded_before_min_tokens(vocab):
    rng = np.random.default_rng(0)
    harness = Harness(6, vocab)
    admitted = [
        admission(0, GREEDY.with_changes(min_tokens=2), prompt=(1, 2, 3), stop_ids=(2, vocab - 1)),
        admission(1, GREEDY, prompt=(1,), stop_ids=(0,)),
        admission(2, GREEDY.with_changes(min_tokens=1), prompt=(1,), stop_ids=(6, 6, 1, 0, 5, 4)),
        admission(3, GREEDY.with_changes(min_tokens=3), prompt=(4,), stop_ids=()),
    ]
    for step in range(4):
        logits = random_logits(rng, 4, vocab)
        expected = logits.copy()
        if step < 2:
            expected[0, [2, vocab - 1]] = -np.inf
        if step < 1:
            expected[2, [6, 1, 0, 5, 4]] = -np.inf
        got = harness.edited([0, 1, 2, 3], [3 + step, 1 + step, 1 + step, 1 + step], logits, admitted)
        assert np.array_equal(got, expected)
        admitted = ()


def test_output_before_a_preemption_counts_towards_min_tokens():
    harness = Harness(2, 7)
    logits = np.zeros((1, 7))
    back = admission(0, GREEDY.with_changes(min_tokens=3), prompt=(1, 2), output=(4, 4), stop_ids=(0,))
    assert np.isneginf(harness.edited([0], [4], logits, [back])[0, 0])
    assert np.array_equal(harness.edited([0], [5], logits), logits)


def test_accepted_drafts_reach_min_tokens_before_the_host_counts_them():
    harness = Harness(2, 7)
    logits = np.zeros((1, 7))
    new = admission(0, GREEDY.with_changes(min_tokens=4), stop_ids=(0,))
    assert np.isneginf(harness.edited([0], [2], logits, [new])[0, 0])
    assert np.isneginf(harness.edited([0], [5], logits)[0, 0])
    assert np.array_equal(harness.edited([0], [6], logits), logits)


def test_min_tokens_costs_nothing_once_reached():
    harness = Harness(2, 7)
    stage = stage_of(harness, MinTokens)
    harness.step([0], [2], np.zeros((1, 7)), [admission(0, GREEDY.with_changes(min_tokens=1), stop_ids=(0,))])
    assert not stage.is_used_by(np.array([0], np.int32))


def test_a_vocabulary_of_stop_ids_may_end():
    harness = Harness(2, 7)
    logits = np.arange(7.0)[None]
    new = admission(0, GREEDY.with_changes(min_tokens=4), stop_ids=range(7))
    assert harness.step([0], [2], logits, [new]).tokens.tolist() == [6]


def test_stop_ids_outside_the_vocabulary_are_ignored():
    harness = Harness(2, 7)
    new = admission(0, GREEDY.with_changes(min_tokens=4), stop_ids=(7, 3, 100))
    got = harness.edited([0], [2], np.zeros((1, 7)), [new])
    assert np.flatnonzero(np.isneginf(got[0])).tolist() == [3]


def test_a_longer_list_of_stop_ids_widens_the_table_for_all():
    harness = Harness(4, 100)
    params = GREEDY.with_changes(min_tokens=9)
    harness.step([0], [2], np.zeros((1, 100)), [admission(0, params, stop_ids=(3,))])
    second = admission(1, params, stop_ids=range(20, 57))
    got = harness.edited([0, 1], [3, 2], np.zeros((2, 100)), [second])
    assert np.flatnonzero(np.isneginf(got[0])).tolist() == [3]
    assert np.flatnonzero(np.isneginf(got[1])).tolist() == list(range(20, 57))
    third = admission(2, params, stop_ids=(5, 6))
    got = harness.edited([2], [2], np.zeros((1, 100)), [third])
    assert np.flatnonzero(np.isneginf(got[0])).tolist() == [5, 6]


# penalties

PENALTIES = [
    SamplingParams(temperature=0, repetition_penalty=1.7),
    SamplingParams(temperature=0, presence_penalty=0.9),
    SamplingParams(temperature=0, frequency_penalty=-0.6),
    SamplingParams(temperature=0, repetition_penalty=0.6, presence_penalty=-1.1, frequency_penalty=0.4),
]


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_penalties_follow_prompt_and_output(vocab, dtype):
    rng = np.random.default_rng(vocab)
    harness, beside = Harness(6, vocab, dtype), Harness(6, vocab, dtype)
    rows = [4, 0, 2, 1, 3]
    params = [PENALTIES[0], GREEDY, *PENALTIES[1:]]
    prompts = [rng.integers(0, min(vocab, 12), 5 + i).tolist() for i in range(5)]
    outputs = [[], [1], [3, 3, 5], [], [2, 2, 2]]
    admitted = [
        admission(row, own, prompt, output)
        for row, own, prompt, output in zip(rows, params, prompts, outputs, strict=True)
    ]
    for _ in range(12):
        logits = random_logits(rng, 5, vocab).astype(np.float32)
        logits[:, : min(vocab, 12)] += 4  # so that tokens come again
        expected = [
            penalized(row, prompt, output, own)
            for row, prompt, output, own in zip(logits, prompts, outputs, params, strict=True)
        ]
        positions = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
        tokens = harness.step(rows, positions, logits, admitted).tokens.tolist()
        edited = beside.edited(rows, positions, logits, admitted)
        np.testing.assert_allclose(edited, expected, rtol=1e-13, atol=2e-6 if dtype == torch.float32 else 0)
        assert tokens == [int(row.argmax()) for row in edited]
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)
        admitted = ()
    assert any(len(set(output)) < len(output) for output in outputs)


def test_only_sampling_rows_count_their_token():
    harness = Harness(6, 7)
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    logits = np.array([[0, 0, 0, 5, 0, 0, 0.0]])
    harness.step([0], [2], logits, [admission(0, params), admission(1, params)])
    got = harness.edited([1, 0], [2, 3], np.repeat(logits, 2, 0))
    assert got[:, 3].tolist() == [5, 4]


def test_a_reused_line_has_no_counts_of_its_last_row():
    harness = Harness(3, 7)
    params = SamplingParams(temperature=0, frequency_penalty=1.0, repetition_penalty=2.0)
    logits = np.array([[8, 0, 0, 8, 0, 0, 0.0]])
    harness.step([0], [4], logits, [admission(0, params, prompt=(0,), output=(3, 3, 3))])
    # the entry goes to another row in the very step in which it was given back
    got = harness.edited([1], [1], logits, [admission(1, params, prompt=(5,))], released=[0])
    assert np.array_equal(got, logits)
    assert stage_of(harness, Penalties).counts.tensor.shape[0] == 3


def test_a_row_without_penalties_after_one_with_them():
    harness = Harness(3, 7)
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    logits = np.array([[8, 0, 0, 8, 0, 0, 0.0]])
    harness.step([0], [1], logits, [admission(0, params, prompt=(0,))])
    got = harness.edited([0], [1], logits, [admission(0, GREEDY, prompt=(0,))], released=[0])
    assert np.array_equal(got, logits)


def test_a_growing_table_keeps_its_content():
    rng = np.random.default_rng(1)
    harness = Harness(21, 100)
    params = SamplingParams(temperature=0, frequency_penalty=1.5, repetition_penalty=1.2)
    prompts = [rng.integers(0, 9, 4).tolist() for _ in range(20)]
    outputs: list[list[int]] = [[] for _ in range(20)]
    sizes = []
    for step in range(20):
        rows = list(range(step + 1))
        logits = random_logits(rng, step + 1, 100)
        logits[:, :9] += 5
        expected = [penalized(logits[row], prompts[row], outputs[row], params).argmax() for row in rows]
        positions = [4 + len(outputs[row]) for row in rows]
        tokens = harness.step(rows, positions, logits, [admission(step, params, prompts[step])]).tokens.tolist()
        assert tokens == expected
        for row in rows:
            outputs[row].append(tokens[row])
        sizes.append(stage_of(harness, Penalties).counts.tensor.shape[0])
    assert sorted(set(sizes)) == [4, 8, 16, 21]


def test_rows_without_penalties_get_no_line():
    harness = Harness(6, 100)
    harness.step([0, 1], [2, 2], np.zeros((2, 100)), [admission(0, GREEDY), admission(1, SamplingParams())])
    assert stage_of(harness, Penalties).counts.tensor.shape[0] == 0


# temperature and truncation

TRUNCATIONS = [
    SamplingParams(temperature=0.7),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=3, temperature=1.9),
    SamplingParams(top_k=10**9, temperature=3.0),
    SamplingParams(top_k=-1),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.95, temperature=2.5),
    SamplingParams(top_k=5, top_p=0.8, temperature=1.3),
    SamplingParams(min_p=0.05, top_p=0.9, temperature=2.0),
    SamplingParams(min_p=0.02, top_k=6, top_p=0.97, temperature=4.0),
    *(SamplingParams(**{name: value}) for name, value in VALUES.items()),
    SamplingParams(**VALUES),
]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_truncation_matches_the_reference(vocab):
    rng = np.random.default_rng(vocab)
    num = len(TRUNCATIONS)
    logits = random_logits(rng, num + 1, vocab)
    expected = [truncated(row, params) for row, params in zip(logits, TRUNCATIONS, strict=False)] + [logits[num]]
    rows = rng.permutation(num + 1)
    admitted = [admission(row, params) for row, params in zip(rows, [*TRUNCATIONS, GREEDY], strict=True)]
    together = Harness(num + 2, vocab).edited(rows, [2] * (num + 1), logits, admitted)
    np.testing.assert_allclose(together, expected, rtol=1e-14)
    for i, entry in enumerate(admitted):
        alone = Harness(num + 2, vocab).edited([entry.row], [2], logits[i : i + 1], [entry])
        assert np.array_equal(alone[0], together[i])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [0, 1, 2, 3]),
        (SamplingParams(top_p=0.5), [0, 1, 2, 3]),
        (SamplingParams(top_p=0.2), [0]),
        (SamplingParams(top_k=2, top_p=0.99), [0, 1, 2, 3]),
        (SamplingParams(min_p=0.5), [0, 1, 2, 3]),
        (SamplingParams(top_k=4, top_p=0.9), [0, 1, 2, 3]),
    ],
)
def test_ties_at_the_edge_stay(params, kept):
    logits = np.array([[2, 2 - 0.5, 2 - 0.5, 2 - 0.5, 0, -1, -1]])
    got = Harness(2, 7).edited([0], [2], logits, [admission(0, params)])
    assert np.flatnonzero(np.isfinite(got[0])).tolist() == kept


@pytest.mark.parametrize(("top_p", "num"), [(0.5, 1), (0.75, 2), (0.4999, 1), (0.5001, 2), (0.7501, 4)])
def test_tokens_that_reach_top_p_exactly_are_enough(top_p, num):
    logits = np.log([[1, 1 / 2, 1 / 4, 1 / 4]])
    got = Harness(2, 4).edited([0], [2], logits, [admission(0, SamplingParams(top_p=top_p))])
    assert np.isfinite(got[0]).sum() == num


def test_ties_do_not_depend_on_a_neighbour_without_top_k():
    """The other row needs a sort; the row's top-p must still sum over its own k tokens."""
    logits = np.zeros((2, 100))
    logits[:, 0] = 1.0
    tied = admission(0, SamplingParams(top_k=3, top_p=0.9))
    alone = Harness(3, 100).edited([0], [2], logits[:1], [tied])
    beside = Harness(3, 100).edited([1, 0], [2, 2], logits, [admission(1, SamplingParams(top_p=0.9)), tied])
    assert np.array_equal(alone[0], beside[1])


def test_top_p_of_one_keeps_the_unlikeliest():
    """In float32 the sum of a long tail goes past 1; nothing may fall off."""
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 2, 1000)
    admitted = [admission(0, SamplingParams(top_k=999)), admission(1, SamplingParams(top_k=999, top_p=0.9))]
    got = Harness(3, 1000, torch.float32).edited([0, 1], [2, 2], logits, admitted)
    assert np.isfinite(got[0]).sum() == 999


def test_truncation_changes_its_own_row_only():
    logits = random_logits(np.random.default_rng(4), 3, 100)
    admitted = [admission(0, SamplingParams()), admission(1, SamplingParams(top_k=2)), admission(2, GREEDY)]
    got = Harness(4, 100).edited([0, 1, 2], [2, 2, 2], logits, admitted)
    assert np.array_equal(got[[0, 2]], logits[[0, 2]])
    assert np.isfinite(got[1]).sum() == 2


def test_masked_tokens_stay_out_of_the_sums():
    logits = np.array([[-np.inf, 0.0, 0.0, -np.inf, 1.0, 0.0, -5.0]])
    for params in (SamplingParams(top_k=6), SamplingParams(top_p=0.999), SamplingParams(min_p=0.001)):
        got = Harness(2, 7).edited([0], [2], logits, [admission(0, params)])
        assert np.flatnonzero(np.isneginf(got[0])).tolist() == [0, 3]


# logprobs


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=3.0, top_k=6), PENALTIES[3]])
def test_logprobs_are_of_the_raw_logits(vocab, k, params):
    rng = np.random.default_rng(vocab + k)
    logits = random_logits(rng, 3, vocab)
    admitted = [admission(row, params, seed=row) for row in range(3)]
    out = Harness(4, vocab).step([2, 0, 1], [2, 2, 2], logits, admitted, num_logprobs=k)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens = out.tokens.numpy()
    chosen = expected[np.arange(3), tokens]
    np.testing.assert_allclose(out.logprobs.chosen.numpy(), chosen, rtol=1e-12)
    assert out.logprobs.rank.tolist() == [int((expected[i] >= chosen[i]).sum()) for i in range(3)]
    order = np.argsort(-expected, -1)[:, :k]
    assert out.logprobs.top_ids.numpy().tolist() == order.tolist()
    np.testing.assert_allclose(out.logprobs.top.numpy(), np.take_along_axis(expected, order, -1), rtol=1e-12)


def test_the_likeliest_token_has_rank_one():
    out = Harness(2, 7).step([0], [2], np.arange(7.0)[None], [admission(0, GREEDY)], num_logprobs=0)
    assert out.logprobs.rank.tolist() == [1]
    assert out.logprobs.top_ids.shape == (1, 0)


def test_no_logprobs_unless_asked():
    assert Harness(2, 7).step([0], [2], np.zeros((1, 7)), [admission(0, GREEDY)]).logprobs is None


def test_pooling_rows_do_not_change_the_sampler():
    """There may be thousands per second; the sampler only handles generation requests."""
    harness = Harness(8, 16)
    seen = []
    for state in harness.sampler._states:
        state.apply = lambda plan, apply=state.apply: (seen.append(plan.released.tolist()), apply(plan))
    each = len(harness.sampler._states)
    harness.sampler.apply(make_plan([5], released=[1, 2, 3]))
    assert not seen
    harness.sampler.apply(make_plan([1], [admission(1, GREEDY)], released=[4]))
    harness.sampler.apply(make_plan([1], released=[2, 3]))
    assert len(seen) == each
    harness.sampler.apply(make_plan([2], released=[3, 1]))
    harness.sampler.apply(make_plan([2], released=[1]))
    assert seen == [[4]] * each + [[3, 1]] * each


class Forbid7(Stage):
    """Of row 1; `key` None: it cannot be captured."""

    def __init__(self, key) -> None:
        self.key = key

    def is_used_by(self, rows):
        return 1 in rows

    def work(self, rows):
        edit = lambda logits, batch: logits[:, 7].fill_(-torch.inf)  # noqa: E731
        return StageWork(self.key, edit, needs_sampling_dtype=True, users=rows == 1)


def prepared(harness, rows):
    return harness.sampler.prepare(make_plan(rows), capture=True)


@pytest.mark.parametrize("key", [None, "forbid 7"])
def test_a_new_stage_needs_no_change_of_the_sampler(key):
    """A step in which a row uses a stage that cannot be captured runs eagerly: a replayed head without the stage would
    ignore the parameter."""
    harness = Harness(4, 20)
    harness.step([0, 1], [2, 2], np.zeros((2, 20)), [admission(0, GREEDY), admission(1, GREEDY)])
    plain = prepared(harness, [0, 1])
    harness.sampler.stages.append(Forbid7(key))
    edited, other = prepared(harness, np.array([0, 1])), prepared(harness, [0, 2])
    assert edited.key == (key and (*plain.key, key)) and edited.needs_sampling_dtype
    assert other.key == plain.key and not plain.needs_sampling_dtype
    logits = torch.zeros(2, 20)
    logits[:, 7], logits[:, 3] = 2, 1
    batch = DrawBatch(torch.tensor([0, 1]), torch.tensor([3, 3]))
    assert plain(logits.clone(), batch).tokens.tolist() == [7, 7]
    indices = [torch.as_tensor(index) for index in edited.indices]
    assert edited(logits.clone(), batch, indices).tokens.tolist() == [3, 3]
