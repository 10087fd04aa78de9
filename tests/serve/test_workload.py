import pytest

from slipstream.base.errors import InvalidOption
from slipstream.serve.bench.measure import Workload, spread


def test_prompts_have_the_lengths_asked_for_and_tokens_of_the_vocabulary():
    items = Workload(num_prompts=5, input_len=12, output_len=7).items(vocab_size=30)
    assert [len(item.prompt) for item in items] == [12] * 5
    assert [item.output_len for item in items] == [7] * 5
    assert {token for item in items for token in item.prompt} <= set(range(30))
    assert len({tuple(item.prompt) for item in items}) == 5


def test_a_range_ratio_spreads_lengths_evenly_up_to_the_full_ones():
    items = Workload(num_prompts=2000, input_len=1024, output_len=512, range_ratio=100 / 1024).items(10)
    inputs, outputs = [len(item.prompt) for item in items], [item.output_len for item in items]
    assert 100 <= min(inputs) < 110 and 1014 < max(inputs) <= 1024
    assert 50 <= min(outputs) < 60 and 500 < max(outputs) <= 512
    assert abs(sum(inputs) / 2000 - 562) < 25


def test_a_seed_repeats_and_a_trial_changes_only_the_tokens():
    workload = Workload(num_prompts=8, input_len=40, output_len=40, range_ratio=0.1, seed=3)
    first, again, other = workload.items(99), workload.items(99), workload.items(99, trial=1)
    assert first == again and first != other
    shape = [(len(item.prompt), item.output_len) for item in first]
    assert shape == [(len(item.prompt), item.output_len) for item in other]


@pytest.mark.parametrize("wrong", [dict(num_prompts=0), dict(input_len=0), dict(output_len=-1), dict(range_ratio=1.5)])
def test_a_workload_that_cannot_be_is_refused(wrong):
    with pytest.raises(InvalidOption, match=f"{next(iter(wrong))} is "):
        Workload(**(dict(num_prompts=1, input_len=1, output_len=1) | wrong))


def test_percentiles_lie_between_the_nearest_two():
    found = spread([0.004, 0.001, 0.002, 0.003, 0.005])
    assert (found.mean, found.p50) == (3.0, 3.0)
    assert found.p90 == pytest.approx(4.6) and found.p99 == pytest.approx(4.96)
    assert spread([0.25]).p99 == 250.0
