"""Random runs of a scheduler: invariants hold, and every request gets the tokens that it gets alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from repeats import seeds
from scripted_bench import Bench
from scripted_tokens import VOCAB, alone
from slipstream.base.errors import QueueFull, RequestTooLarge
from slipstream.contracts.request import Request, Status
from slipstream.scheduler.cache.matching import Matching
from slipstream.scheduler.cache.states import CheckpointPool, StateCache


class Day:
    def __init__(self, seed: int, depth: int, *, has_states: bool = False) -> None:
        self.has_states = has_states
        rng = self.rng = random.Random(seed * 3 + depth)
        page_size = rng.choice([1, 1, 2, 4, 8])
        chunked = rng.random() < 0.7
        self.max_model_len = rng.choice([24, 48])
        longest = -(-self.max_model_len // page_size)
        narrow, wide = rng.randint(1, 6), rng.randint(5, 20)
        windows = rng.choice([(0,), (0,), (0, 0), (wide,), (narrow, 0), (0, wide, narrow)])
        if has_states and seed % 5 == 0:
            windows = ()  # no attention at all
        self.bench = Bench(
            depth=rng.choice([0, 0, depth]),  # sets the watermark: a low one makes pages run out more often
            page_size=page_size,
            num_pages=1 + rng.randint(longest - longest // 4, 2 * longest),
            prefix_caching=rng.random() < 0.7,
            windows=windows,
            num_groups=len(windows),
            window_pages=1 + rng.randint(longest // 2, 2 * longest),
            max_num_seqs=rng.choice([1, 4, 8, 8]),
            max_num_batched_tokens=rng.choice([1, 3, 7, 16, 40]) if chunked else self.max_model_len,
            max_model_len=self.max_model_len,
            max_waiting=rng.choice([4, 30]),
            chunked_prefill=chunked,
            staged_ints=rng.choice([1, 60, 4096]),
            short_rope=rng.choice([None, None, 6, 16]),
            num_drafts=(0, 4, 1)[seed % 3],
            draft_seed=seed,
            drops_last_page=seed % 3 == 1 and seed % 2 == 0,  # as with a draft head, whose entries need the next token
            **(self.states(seed, page_size) if has_states else {}),
        )
        self.bench.depth = depth
        self.roots = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
        self.aborted: set[Request] = set()
        self.refused = 0

    def states(self, seed: int, page_size: int) -> dict[str, int]:
        """Few checkpoints, so that they are overwritten all the time."""
        rng = random.Random(seed)
        border = max(page_size, rng.choice([2, 4, 8]))
        return dict(num_checkpoints=rng.choice([2, 2, 3, 8, 0]), border=border, spacing=border * rng.choice([1, 3]))

    def submit(self) -> None:
        rng = self.rng
        caller = rng.choice(["", "", "", "a"])
        root = rng.choice(self.roots)[: rng.choice([0, 12, 20, 18, 20] if self.has_states else [0, 2, 5, 9, 20])]
        prompt = root + [rng.randrange(VOCAB) for _ in range(rng.randint(not root, 3))]
        try:
            if rng.random() < 0.25:
                long = prompt * (self.max_model_len if rng.random() < 0.3 else 1)
                task = rng.choice(["embed", "token_embed"])
                priority, salt = rng.choice([0, 0, 1]), rng.choice(["", "", "x"])
                self.bench.pool(long[: self.max_model_len], task=task, priority=priority, salt=salt, caller=caller)
                return
            self.bench.submit(
                prompt,
                n=rng.choice([1, 1, 2, 3]),
                max_tokens=rng.choice([1, 4, 15, 40, 40]),
                stop=rng.sample(range(VOCAB), rng.choice([0, 2, 8])),
                min_tokens=rng.choice([0, 0, 1]),
                seed=rng.randrange(3),
                priority=rng.choice([0, 0, 0, 1, 2]),
                salt=rng.choice(["", "", "x"]),
                caller=caller,
                presence_penalty=rng.choice([0.0, 0.0, 0.5]),
                logprobs=rng.choice([None, None, 0, 2]),
            )
        except (QueueFull, RequestTooLarge):
            self.refused += 1

    def abort(self) -> None:
        """Also of requests that have ended, and of samples that never existed."""
        if self.bench.requests:
            request = self.rng.choice(self.bench.requests[-12:])
            sample = self.rng.choice([None, 0, 1])
            gone = self.bench.scheduler.abort(request.id, sample)
            assert all(r.status is Status.FINISHED and r.id == request.id for r in gone)
            assert not self.bench.scheduler.abort(request.id, sample)
            self.aborted.update(gone)

    def run(self, steps: int) -> None:
        bench, rng = self.bench, self.rng
        rush = 0.5
        for step in range(steps):
            if step % 25 == 0:
                rush = rng.choice([0.0, 0.2, 0.6, 0.9])
                if bench.executor.drafter is not None:
                    bench.scheduler.drafts.num_drafts = rng.choice([0, 1, 4, 4])
            if rng.random() < rush:
                self.submit()
            if rng.random() < 0.08:
                self.abort()
            bench.step()
            if rng.random() < (0.06 if bench.scheduler.num_preemptions else 0.5):  # pages may never run out
                bench.preempt_any(rng)
            if bench.num_in_flight and rng.random() < 0.1:
                bench.commit()
            if step % 4 == 0:
                bench.scheduler.check()
        bench.run()
        assert bench.scheduler.num_preemptions
        for request in bench.requests:
            assert request.status is Status.FINISHED
            if request.pooling is not None:
                if request not in self.aborted:
                    bench.check_tokens(request)
                continue
            got, (expected, _reason) = bench.output_of(request), alone(request, bench.horizon)
            if request in self.aborted:
                assert got == expected[: len(got)]
            else:
                bench.check_tokens(request)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", seeds(14, kept=7))
def test_a_random_run_changes_no_tokens(seed: int, depth: int) -> None:
    Day(seed, depth).run(150)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", seeds(14, kept=7))
def test_a_random_run_with_recurrent_states_changes_no_tokens(seed: int, depth: int) -> None:
    Day(seed, depth, has_states=True).run(150)


@pytest.mark.parametrize("bug", ["restored before it is saved", "published under the next hash", "kept after a take"])
def test_the_random_runs_find_planted_bugs_of_the_state_cache(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "restored before it is saved":
        monkeypatch.setattr(CheckpointPool, "find", lambda pool, name: pool._checkpoint_of.get(name))
    elif bug == "published under the next hash":
        right = StateCache._hash_before
        monkeypatch.setattr(
            StateCache,
            "_hash_before",
            lambda cache, request, position: right(cache, request, min(position + 8, len(request.hashes))),
        )
    else:
        monkeypatch.setattr(CheckpointPool, "_forget", lambda pool, checkpoint: None)
    with pytest.raises(AssertionError):
        for seed in range(40):
            Day(seed, depth=1, has_states=True).run(100)


def test_the_random_runs_with_states_cover_every_event() -> None:
    days = [Day(seed, depth=2, has_states=True) for seed in range(20)]
    for day in days:
        day.run(150)
    benches = [day.bench for day in days]
    assert sum(bench.executor.states.num_restored for bench in benches) > 60
    assert sum(bench.executor.states.num_saved for bench in benches) > 500
    assert sum(bench.scheduler.num_preemptions for bench in benches) > 20
    assert sum(bench.executor.num_switched for bench in benches) > 10
    assert sum(bench.executor.num_accepted for bench in benches) > 300
    assert sum(bench.executor.num_rejected for bench in benches) > 300
    resumed = [
        admission
        for bench in benches
        for plan in bench.plans
        for admission in plan.admitted
        if admission.num_cached and admission.num_known > admission.num_prompt_tokens
    ]
    assert len(resumed) > 5, "too few preempted requests continued from a checkpoint"
    siblings = [request for bench in benches for request in bench.requests if request.sample and request.num_cached]
    assert len(siblings) > 10


def test_the_random_runs_cover_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzz is useful only if all of these events happen."""
    kept: list[Request] = []
    changed: list[Request] = []
    keep, refresh = Matching.keep, Matching.refresh

    def note_kept(matching: Matching) -> None:
        kept.append(matching.request)
        keep(matching)

    def note_changed(matching: Matching) -> Sequence[list[int]]:
        before = matching.pages
        if refresh(matching) is not before:
            changed.append(matching.request)
        return matching.pages

    monkeypatch.setattr(Matching, "keep", note_kept)
    monkeypatch.setattr(Matching, "refresh", note_changed)
    days = [Day(seed, depth=2) for seed in range(20)]
    for day in days:
        day.run(150)
    assert sum(day.bench.scheduler.num_preemptions for day in days) > 30
    assert sum(day.bench.cache.num_hits for day in days) > 100
    assert sum(day.refused for day in days) > 5
    assert sum(len(day.aborted) for day in days) > 20
    assert sum(len(plan.copies) for day in days for plan in day.bench.plans) > 10
    assert sum(day.bench.executor.pages.num_given_back for day in days) > 100
    assert sum(day.bench.executor.num_switched for day in days) > 10
    assert sum(day.bench.executor.num_accepted for day in days) > 300
    assert sum(day.bench.executor.num_rejected for day in days) > 300
    assert any(request.num_preemptions > 1 for day in days for request in day.bench.requests)
    pooling = [request for day in days for request in day.bench.requests if request.pooling is not None]
    assert sum(request.num_cached > 0 for request in pooling) > 3
    assert len(kept) > 50 and len(changed) > 20
