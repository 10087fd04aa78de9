import msgspec

from slipstream.config.config import SchedulerConfig
from slipstream.scheduler.budget import Budget

CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=100, max_model_len=64, max_waiting=9, chunked_prefill=True, depth=0, seed=0,
    staged_ints=50,
)  # fmt: skip


def test_an_admission_costs_tokens_a_row_three_ints_a_page_and_its_other_numbers():
    budget = Budget(CONFIG, free_rows=2)
    budget.admit(tokens=30, num_places=4, numbers=10)
    assert (budget.tokens, budget.rows, budget.ints) == (70, 1, 28)
    assert budget.can_stage(num_places=9, numbers=1)
    assert not budget.can_stage(num_places=9, numbers=2)


def test_the_first_admission_fits_however_large():
    budget = Budget(CONFIG, free_rows=2)
    assert budget.can_stage(num_places=1000, numbers=64)
    budget.admit(1, num_places=1000, numbers=64)
    assert not budget.can_stage(num_places=1, numbers=0)


def test_a_step_starts_with_all_there_is():
    config = msgspec.structs.replace(CONFIG, staged_ints=7, max_num_batched_tokens=3)
    budget = Budget(config, free_rows=1)
    assert (budget.tokens, budget.rows, budget.ints) == (3, 1, 7)
