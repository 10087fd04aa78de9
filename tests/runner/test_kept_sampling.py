"""The captured work of a step's draws is found again while the same rows draw."""

from dataclasses import replace

import numpy as np
import torch
from sampling_harness import GREEDY, Harness, admission, make_plan


def prepare(sampler, plan):
    return sampler.prepare(plan, capture=True)


def test_captured_work_is_found_again_for_the_same_rows_until_one_of_them_changes():
    harness = Harness(4, 20)
    sampler, plan = harness.sampler, make_plan([0, 1], [admission(0, GREEDY), admission(1, GREEDY)])
    later = replace(plan, admitted=(), step=1)
    harness.launch(plan, [2, 2], torch.zeros(2, 20, dtype=torch.float64), lambda _: None)
    found, was_read = prepare(sampler, plan), sampler.reads_output(plan)
    sampler.apply(later)
    assert prepare(sampler, later) is found and not sampler.needs_late(later)
    assert prepare(sampler, replace(later, num_logprobs=2)).num_logprobs is not None
    changed = admission(1, GREEDY.with_changes(presence_penalty=1.0), number=2)
    other = replace(later, admitted=(changed,), released=np.array([1], np.int32), step=2)
    harness.launch(other, [3, 2], torch.zeros(2, 20, dtype=torch.float64), lambda _: None)
    assert prepare(sampler, other).key != found.key
    assert not was_read and sampler.reads_output(other), "penalties depend on the output"


def test_captured_work_that_counts_its_steps_is_made_in_every_step():
    harness = Harness(4, 20)
    come = admission(0, GREEDY.with_changes(min_tokens=3), stop_ids=[7])
    plan = make_plan([0], [come])
    harness.launch(plan, [2], torch.zeros(1, 20, dtype=torch.float64), lambda _: None)  # the first of three steps
    plan = replace(plan, admitted=())
    keys = [prepare(harness.sampler, plan).key for _ in range(4)]
    assert keys[0] == keys[1] != keys[2] == keys[3]
