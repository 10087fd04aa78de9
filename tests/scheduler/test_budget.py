import msgspec
import pytest

from scripted_bench import Bench
from slipstream.config.config import SchedulerConfig
from slipstream.contracts.request import Request
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.planners import Budget

CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=100, max_model_len=64, max_waiting=9, chunked_prefill=True, depth=0, seed=0,
    staged_ints=50,
)  # fmt: skip


def test_an_admission_costs_tokens_a_row_three_ints_a_page_and_its_other_numbers():
    budget = Budget(CONFIG, free_rows=2)
    budget.admit(tokens=30, num_entries=4, num_ints=10)
    assert (budget.tokens, budget.rows, budget.ints) == (70, 1, 28)
    assert budget.can_stage(num_entries=9, num_ints=1)
    assert not budget.can_stage(num_entries=9, num_ints=2)


def test_the_first_admission_fits_however_large():
    budget = Budget(CONFIG, free_rows=2)
    assert budget.can_stage(num_entries=1000, num_ints=64)
    budget.admit(1, num_entries=1000, num_ints=64)
    assert not budget.can_stage(num_entries=1, num_ints=0)


def test_a_step_starts_with_all_there_is():
    config = msgspec.structs.replace(CONFIG, staged_ints=7, max_num_batched_tokens=3)
    budget = Budget(config, free_rows=1)
    assert (budget.tokens, budget.rows, budget.ints) == (3, 1, 7)


@pytest.mark.parametrize(
    "params",
    [
        dict(allowed_token_ids=list(range(3000))),
        dict(logit_bias=dict.fromkeys(range(1000), 1.0)),
        dict(logprob_token_ids=list(range(3000))),
        dict(stop=list(range(1000, 4000)), min_tokens=2),
    ],
    ids=lambda params: next(iter(params)),
)
def test_lists_of_ids_are_counted(params):
    """Two of these do not fit one upload, so the second comes a step later."""
    bench = Bench(staged_ints=4096)
    for token in (1, 2):
        bench.submit([token] * 4, max_tokens=3, **params)
    assert [len(bench.plan().admitted) for _ in range(2)] == [1, 1]
    light = Bench(staged_ints=4096)
    for token in (1, 2):
        light.submit([token] * 4, max_tokens=3, stop=list(range(1000, 4000)))  # without min_tokens they stay here
    assert len(light.plan().admitted) == 2


def test_bad_words_cost_two_numbers_a_token():
    words = tuple((1, 2, 3) for _ in range(500))
    request = Request("a", [1, 2], SamplingParams(bad_words=["x"]), bad_words=words, max_length=9)
    assert request.num_staged_ids == 3000
