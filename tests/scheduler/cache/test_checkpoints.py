"""CheckpointPool: names, order of reuse, and the limit for generated tokens."""

from __future__ import annotations

import random

from slipstream.scheduler.cache.states import CheckpointPool


def save(pool: CheckpointPool, name: bytes, *, generated: bool = False) -> int | None:
    checkpoint = pool.take(generated=generated)
    if checkpoint is not None:
        pool.publish(checkpoint, name, generated=generated)
    pool.end_plan()
    return checkpoint


def test_the_least_recently_used_is_overwritten() -> None:
    pool = CheckpointPool(2)
    first, second = save(pool, b"a"), save(pool, b"b")
    assert (pool.find(b"a"), pool.find(b"b")) == (first, second)
    assert first is not None
    pool.restore(first)
    assert save(pool, b"c") == second
    assert pool.find(b"a") == first and pool.find(b"b") is None
    assert pool.refresh(b"a") and save(pool, b"d") == second
    pool.check([])


def test_a_plan_finds_nothing_that_it_saves_itself_and_saves_to_no_checkpoint_twice() -> None:
    pool = CheckpointPool(2)
    for name in (b"a", b"b"):
        checkpoint = pool.take()
        assert checkpoint is not None
        pool.publish(checkpoint, name)
    assert pool.find(b"a") is None and pool.refresh(b"a")
    assert pool.take() is None
    before = pool.version
    pool.end_plan()
    assert pool.version > before and pool.find(b"a") is not None and pool.take() is not None


def test_generated_tokens_get_half_of_the_checkpoints() -> None:
    pool = CheckpointPool(4)
    save(pool, b"a", generated=True)
    save(pool, b"b", generated=True)
    save(pool, b"c", generated=True)
    assert pool.find(b"a") is None and pool.find(b"b") is not None
    prompts = [save(pool, name) for name in (b"d", b"e")]
    assert None not in prompts and pool.find(b"c") is not None
    held = [pool.take(generated=True), pool.take(generated=True)]
    assert pool.find(b"b") is None and pool.find(b"c") is None and pool.take(generated=True) is None
    pool.check([checkpoint for checkpoint in held if checkpoint is not None])
    for checkpoint in held:
        assert checkpoint is not None
        pool.drop(checkpoint)
    pool.end_plan()
    assert save(pool, b"f") in held


def test_an_older_state_of_a_request_is_forgotten_unless_it_was_restored() -> None:
    pool = CheckpointPool(8)
    save(pool, b"a", generated=True)
    pool.retire(b"a")
    assert pool.find(b"a") is None
    kept = save(pool, b"b", generated=True)
    assert kept is not None
    pool.restore(kept)
    pool.retire(b"b")
    assert pool.find(b"b") == kept
    pool.unpublish(b"b")
    pool.unpublish(b"never saved")
    assert pool.find(b"b") is None
    pool.check([])


def test_a_plan_loads_to_no_checkpoint_that_it_uses() -> None:
    """It loads before it restores, and restores before it saves."""
    pool = CheckpointPool(1)
    only = save(pool, b"a")
    assert only is not None
    pool.restore(only)
    assert pool.take_for_load((), b"b") is None and pool.find(b"a") == only
    pool.end_plan()
    assert pool.take_for_load((only,), b"b") is None
    assert pool.take_for_load((), b"b") == only and pool.find(b"b") == only and pool.find(b"a") is None
    saved = pool.take()
    assert saved == only
    pool.publish(saved, b"c")
    assert pool.take_for_load((), b"c") is None and pool.take_for_load((), b"d") is None
    pool.end_plan()
    assert pool.take_for_load((), b"c") is None, "a checkpoint has this hash"
    assert pool.take_for_load((), b"d") == only
    pool.check([])


def test_without_checkpoints_nothing_is_taken() -> None:
    pool = CheckpointPool(0)
    assert pool.take() is None and pool.take(generated=True) is None
    pool.check([])


def test_invariants_hold_in_any_order() -> None:
    rng = random.Random(1)
    for size in (1, 2, 5):
        pool, held = CheckpointPool(size), []
        for _ in range(400):
            name = bytes([rng.randrange(8)])
            action = rng.randrange(7)
            if action == 0 and not pool.refresh(name) and (checkpoint := pool.take()) is not None:
                pool.publish(checkpoint, name)
            elif action == 1 and (checkpoint := pool.take(generated=True)) is not None:
                held.append(checkpoint)
            elif action == 2 and held and not pool.refresh(name):
                pool.publish(held.pop(), name, generated=True)
            elif action == 3 and held:
                pool.drop(held.pop())
            elif action == 4 and (found := pool.find(name)) is not None:
                pool.restore(found)
            elif action == 5:
                rng.choice([pool.retire, pool.unpublish])(name)
            else:
                pool.end_plan()
            pool.check(held)
