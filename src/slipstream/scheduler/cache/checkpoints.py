"""CheckpointPool: which checkpoint holds which recurrent state, and which checkpoint is overwritten next.

A checkpoint is found by the hash of the page that ends where its state was taken; that hash covers all tokens before.
No request holds a checkpoint that can be found: restoring is a copy. So any of them can be overwritten, the least
recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container


class CheckpointPool:
    """Checkpoints 0 to num_checkpoints - 1. States after generated tokens take up at most half of them: every decode
    row saves one from time to time, and most are never used."""

    def __init__(self, num_checkpoints: int) -> None:
        self.num_checkpoints = num_checkpoints
        self.version = 0  # changes when the answer of `find` may have changed
        self._max_generated = max(1, num_checkpoints // 2)
        # Checkpoints that can be taken, the next one first: those without a hash, then the least recently used.
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_checkpoints))
        self._hash_of: list[bytes | None] = [None] * num_checkpoints
        self._checkpoint_of: dict[bytes, int] = {}
        # with states after generated tokens, and not restored yet; oldest first
        self._generated: OrderedDict[int, None] = OrderedDict()
        self._num_held = 0  # taken for generated tokens whose values are not known yet
        self._new: set[int] = set()  # saved by the plan under construction
        self._restored: set[int] = set()  # by the plan under construction
        self.on_keep: Callable[[int, bytes], None] | None = None  # called with states worth a slot of the second tier

    def find(self, page_hash: bytes) -> int | None:
        """The checkpoint with this hash. One that the plan under construction saves does not count: a plan restores
        before it saves."""
        checkpoint = self._checkpoint_of.get(page_hash)
        return None if checkpoint is None or checkpoint in self._new else checkpoint

    def refresh(self, page_hash: bytes) -> bool:
        """Whether a checkpoint has this hash already. It becomes the most recently used."""
        checkpoint = self._checkpoint_of.get(page_hash)
        if checkpoint is None:
            return False
        self._order.move_to_end(checkpoint)
        return True

    def restore(self, checkpoint: int) -> None:
        """A request restores this checkpoint, so others may: it becomes the most recently used."""
        self._order.move_to_end(checkpoint)
        self._generated.pop(checkpoint, None)
        self._restored.add(checkpoint)

    def hash_of(self, checkpoint: int) -> bytes | None:
        return self._hash_of[checkpoint]

    def keep(self, page_hash: bytes) -> None:
        """A request that saved the state under this hash will save no newer one: it may go to the second tier."""
        checkpoint = self._checkpoint_of.get(page_hash)
        if checkpoint is not None and self.on_keep is not None:
            self.on_keep(checkpoint, page_hash)

    def take_for_load(self, loaded: Container[int], page_hash: bytes) -> int | None:
        """A checkpoint that the plan under construction loads from the second tier, before it restores and saves
        states; it can be found at once. None: the least recently used one is restored, saved or loaded by this plan.
        `loaded`: those that it loads already."""
        checkpoint = next(iter(self._order), None)
        if checkpoint is None or page_hash in self._checkpoint_of:  # saved by this plan
            return None
        if checkpoint in self._new or checkpoint in self._restored or checkpoint in loaded:
            return None
        self._forget(checkpoint)
        del self._order[checkpoint]
        self.publish(checkpoint, page_hash)
        return checkpoint

    def take(self, *, generated: bool = False) -> int | None:
        """A checkpoint for the plan under construction to save to; its former state can no longer be found. None if
        there is none, or none that this plan does not save to already. `publish` or `drop` must follow."""
        if generated and self._num_held + len(self._generated) >= self._max_generated:
            checkpoint = next(iter(self._generated), None)
        else:
            checkpoint = next(iter(self._order), None)
        if checkpoint is None or checkpoint in self._new:
            return None
        self._forget(checkpoint)
        del self._order[checkpoint]
        self._new.add(checkpoint)
        self._num_held += generated
        return checkpoint

    def publish(self, checkpoint: int, page_hash: bytes, *, generated: bool = False) -> None:
        """Make a taken checkpoint findable."""
        assert page_hash not in self._checkpoint_of, "another checkpoint has this hash"
        self._checkpoint_of[page_hash] = checkpoint
        self._hash_of[checkpoint] = page_hash
        self._order[checkpoint] = None
        if generated:
            self._num_held -= 1
            self._generated[checkpoint] = None
        self.version += 1

    def drop(self, checkpoint: int) -> None:
        """A checkpoint taken for generated tokens is not needed: it will be taken next."""
        self._num_held -= 1
        self._order[checkpoint] = None
        self._order.move_to_end(checkpoint, last=False)

    def retire(self, page_hash: bytes) -> None:
        """The request that saved this state after generated tokens has a newer one: forget it, unless it was restored
        meanwhile."""
        checkpoint = self._checkpoint_of.get(page_hash)
        if checkpoint is not None and checkpoint in self._generated:
            self.unpublish(page_hash)

    def unpublish(self, page_hash: bytes) -> None:
        """Make the checkpoint with this hash unfindable, if there is one; it will be taken next."""
        checkpoint = self._checkpoint_of.get(page_hash)
        if checkpoint is not None:
            self._forget(checkpoint)
            self._order.move_to_end(checkpoint, last=False)

    def unpublish_all(self) -> None:
        """Make all checkpoints unfindable."""
        for page_hash in list(self._checkpoint_of):
            self.unpublish(page_hash)

    def end_plan(self) -> None:
        """The plan under construction is complete: later plans may restore what it saves."""
        self._restored.clear()
        if self._new:
            self._new.clear()
            self.version += 1

    def _forget(self, checkpoint: int) -> None:
        page_hash = self._hash_of[checkpoint]
        if page_hash is not None:
            del self._checkpoint_of[page_hash]
            self._hash_of[checkpoint] = None
            self._generated.pop(checkpoint, None)
            self.version += 1

    def check(self, held: list[int]) -> None:
        """Assert the invariants; `held`: what requests have taken for generated tokens. For tests."""
        assert len(held) == self._num_held, f"{held} are held, {self._num_held} are counted"
        assert sorted([*held, *self._order]) == list(range(self.num_checkpoints)), f"{held} and {self._order}"
        assert self._num_held + len(self._generated) <= self._max_generated, "too many after generated tokens"
        for page_hash, checkpoint in self._checkpoint_of.items():
            assert self._hash_of[checkpoint] == page_hash and checkpoint in self._order, f"{checkpoint} is lost"
        assert sum(page_hash is not None for page_hash in self._hash_of) == len(self._checkpoint_of)
        assert all(self._hash_of[checkpoint] is not None for checkpoint in self._generated)
