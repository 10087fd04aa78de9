"""StateCache: where checkpoints of recurrent states are taken, and which of them a request continues from.

A recurrent state cannot be cut like pages: a request can only continue where a checkpoint was taken. Checkpoints are
taken at multiples of `border` positions, by the step that computes the position before: no chunk is cut for them.
States never preempt a request and never delay an admission; without a free checkpoint the least recently used one is
overwritten.

Where checkpoints of a prompt are taken, most important first:

* at its last border, for the same prompt with more text after it;
* where cached pages of the request ended: another request continued differently from there, so a third one may too;
* near its end, at distances that double, for the same prompt with another end;
* at multiples of `spacing`, which is about as many positions as take the memory of a state in pages.

While a request decodes, the newest border is kept: the next prompt of a conversation continues there, and so does the
request itself after a preemption. With drafts the host does not know in which step the state passes a border; the
device saves only states after accepted tokens. Without drafts a row may be a position behind its plan, if it has sat
out a step: what this plan has saved is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container

from slipstream.config.config import StateConfig
from slipstream.contracts.request import NEVER, Request, RequestStates
from slipstream.scheduler.cache.pages import HashAt

Restore = tuple[Request, int]
"""A request and the checkpoint that its row starts from."""
Save = tuple[Request, int, int]
"""A request, a position, and the checkpoint that its state after so many tokens is saved to."""

MAX_SHARE = 4  # a prompt takes at most one checkpoint in so many
SERIES = 64  # distances from the end of a prompt start at one part in so many of its length


class StateCache:
    def __init__(self, config: StateConfig, page_size: int, max_drafts: int = 0, following: int = 0) -> None:
        """`max_drafts`: of a row in one step; `following`: as in `extend_hashes`."""
        assert config.border % page_size == 0, f"borders at {config.border} positions, pages of {page_size}"
        self.max_drafts = max_drafts
        self._following = following
        self._num_unsure = max_drafts + 1 if max_drafts else 0
        self.border = config.border
        self.spacing = config.spacing
        self.page_size = page_size
        self.pool = CheckpointPool(config.num_checkpoints)
        self._max_saves = max(2, config.num_checkpoints // MAX_SHARE)
        self._restores: list[Restore] = []  # of the plan under construction
        self._saves: list[Save] = []
        self._open_saves: set[Request] = set()  # with a checkpoint that a later plan may save

    @property
    def version(self) -> int:
        """Changes when the result of `longest` may have changed."""
        return self.pool.version

    def longest(self, hash_at: HashAt, num_pages: int) -> tuple[int, int]:
        """Pages before the last checkpoint within the first `num_pages` pages of a request, and that checkpoint;
        (0, -1) if there is none."""
        step = self.border // self.page_size
        for pages in range(num_pages // step * step, 0, -step):
            checkpoint = self.pool.find(hash_at(pages - 1))
            if checkpoint is not None:
                return pages, checkpoint
        return 0, -1

    def admit(self, request: Request, start: int, branch: int, checkpoint: int) -> None:
        """A request begins at position `start`, from a checkpoint unless that is 0. `branch`: positions whose pages
        were found."""
        # where a hash covers the token after its page, a border at the end of the prompt is one of generated tokens
        known = len(request.tokens) - self._following
        request.next_border = (known // self.border + 1) * self.border
        request.states = RequestStates(self.save_positions(start, known, branch)[::-1])
        if start:
            self.pool.restore(checkpoint)
            self._restores.append((request, checkpoint))

    def save_positions(self, start: int, known: int, branch: int) -> list[int]:
        """Positions of the checkpoints within the first `known` tokens of a prompt, if positions from `start` on are
        computed."""
        border = self.border
        end = known // border * border
        wanted = [end, branch // border * border, end - border]
        distance = max(border, known // SERIES // border * border)
        while distance < end - start:
            wanted.append(end - distance)
            distance *= 2
        chosen = dict.fromkeys(position for position in wanted if start < position <= end)
        near = list(chosen)[: self._max_saves]
        # as many multiples of the spacing as there is room for, evenly spread
        spacing = self.spacing
        while (end - start) // spacing > self._max_saves - len(near) and spacing < end:
            spacing *= 2
        spread = range((start // spacing + 1) * spacing, end, spacing)
        return sorted({*near, *spread[: self._max_saves - len(near)]})

    def save_chunk(self, request: Request) -> None:
        """The plan under construction computes the request's positions up to `computed`; the tokens are known."""
        states = request.states
        assert states is not None
        while states.saves and states.saves[-1] <= request.computed:
            position = states.saves.pop()
            page_hash = self._hash_before(request, position)
            if self.pool.refresh(page_hash):
                continue
            checkpoint = self.pool.take()
            if checkpoint is not None:
                self._saves.append((request, position, checkpoint))
                self.pool.publish(checkpoint, page_hash)
                self.pool.keep(page_hash)

    def save_generated(self, request: Request, length: int) -> None:
        """The plan under construction computes positions up to `length`, an upper bound with drafts, whose tokens may
        not be known. With drafts the state may pass the border in a later plan: all of them have the save until the
        checkpoint is published."""
        states = request.states
        assert states is not None
        while request.next_border <= length:
            position, request.next_border = request.next_border, request.next_border + self.border
            if self.max_drafts and states.unpublished:
                continue  # a row has one save that may be late
            checkpoint = self.pool.take(generated=True)
            if checkpoint is None:
                continue
            states.unpublished.append((position, checkpoint))
            if self.max_drafts:
                self._open_saves.add(request)
            else:
                self._saves.append((request, position, checkpoint))

    def publish(self, request: Request) -> None:
        """Make checkpoints after generated tokens findable, once a token drawn after the position is known: then the
        state is known to be valid too. Only the newest of a request is kept.

        With drafts, the state passes the position in the first step that begins behind it, or before that; the last
        committed step began at most `max_drafts + 1` positions before the committed ones."""
        states = request.states
        assert states is not None
        while states.unpublished and states.unpublished[0][0] + self._num_unsure <= request.num_committed:
            position, checkpoint = states.unpublished.pop(0)
            self._open_saves.discard(request)
            page_hash = self._hash_before(request, position)
            if self.pool.refresh(page_hash):
                self.pool.drop(checkpoint)
            else:
                self.pool.publish(checkpoint, page_hash, generated=True)
            if states.latest is not None:
                self.pool.retire(states.latest)
            states.latest = page_hash

    def take_back(self, request: Request) -> None:
        """The request draws nothing in a step that is committed now, so a plan after it that is in flight computes a
        position less than it counts. What it saves is not the state at a border: that is saved when a later plan
        computes the position. With drafts the device takes care of it."""
        states = request.states
        if states is None or self.max_drafts:
            return
        while states.unpublished and states.unpublished[-1][0] > len(request.tokens):
            request.next_border, checkpoint = states.unpublished.pop()
            self.pool.drop(checkpoint)
            request.decode_limit = 0  # the next plan looks at the border

    def publish_after(self, request: Request) -> int:
        """With more known tokens than this there is a checkpoint to publish."""
        states = request.states
        return NEVER if states is None or not states.unpublished else states.unpublished[0][0] + self._num_unsure

    def release(self, request: Request) -> None:
        """The request leaves its row. Its checkpoints that can be found stay."""
        states = request.states
        assert states is not None
        for _, checkpoint in states.unpublished:
            self.pool.drop(checkpoint)
        if states.latest is not None:
            self.pool.keep(states.latest)
        self._open_saves.discard(request)
        request.states = None
        request.next_border = NEVER

    def unpublish(self, request: Request) -> None:
        """Make all checkpoints along the request's tokens unfindable."""
        for page_hash in request.hashes:
            self.pool.unpublish(page_hash)

    def take_copies(self) -> tuple[list[Restore], list[Save]] | None:
        """The restores and saves of the plan under construction, which is complete then. None: nothing. Requests with
        a late save need not be part of the plan."""
        for request in self._open_saves:
            if request.states is not None:
                self._saves += [(request, position, checkpoint) for position, checkpoint in request.states.unpublished]
        if not self._restores and not self._saves:
            return None
        copies, self._restores, self._saves = (self._restores, self._saves), [], []
        self.pool.end_plan()
        return copies

    def check(self, requests: set[Request]) -> None:
        """Assert the invariants; `requests`: all that run. For tests."""
        unpublished = []
        for request in requests:
            assert request.states is not None, f"{request} runs without states"
            assert request.computed < request.next_border, f"{request} passed the border {request.next_border}"
            unpublished += [checkpoint for _, checkpoint in request.states.unpublished]
        self.pool.check(unpublished)

    def _hash_before(self, request: Request, position: int) -> bytes:
        return request.hashes[position // self.page_size - 1]


# CheckpointPool: which checkpoint holds which recurrent state, and which checkpoint is overwritten next.
#
# A checkpoint is found by the hash of the page that ends where its state was taken; that hash covers all tokens before.
# No request holds a checkpoint that can be found: restoring is a copy. So any of them can be overwritten, the least
# recently used first.


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
        self._num_kept = 0  # taken for generated tokens whose values are not known yet
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
        if generated and self._num_kept + len(self._generated) >= self._max_generated:
            checkpoint = next(iter(self._generated), None)
        else:
            checkpoint = next(iter(self._order), None)
        if checkpoint is None or checkpoint in self._new:
            return None
        self._forget(checkpoint)
        del self._order[checkpoint]
        self._new.add(checkpoint)
        self._num_kept += generated
        return checkpoint

    def publish(self, checkpoint: int, page_hash: bytes, *, generated: bool = False) -> None:
        """Make a taken checkpoint findable."""
        assert page_hash not in self._checkpoint_of, "another checkpoint has this hash"
        self._checkpoint_of[page_hash] = checkpoint
        self._hash_of[checkpoint] = page_hash
        self._order[checkpoint] = None
        if generated:
            self._num_kept -= 1
            self._generated[checkpoint] = None
        self.version += 1

    def drop(self, checkpoint: int) -> None:
        """A checkpoint taken for generated tokens is not needed: it will be taken next."""
        self._num_kept -= 1
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

    def check(self, unpublished: list[int]) -> None:
        """Assert the invariants; `unpublished`: what requests have taken for generated tokens. For tests."""
        assert len(unpublished) == self._num_kept, f"{unpublished} are unpublished, {self._num_kept} are counted"
        assert sorted([*unpublished, *self._order]) == list(range(self.num_checkpoints)), (
            f"{unpublished} and {self._order}"
        )
        assert self._num_kept + len(self._generated) <= self._max_generated, "too many after generated tokens"
        for page_hash, checkpoint in self._checkpoint_of.items():
            assert self._hash_of[checkpoint] == page_hash and checkpoint in self._order, f"{checkpoint} is lost"
        assert sum(page_hash is not None for page_hash in self._hash_of) == len(self._checkpoint_of)
        assert all(self._hash_of[checkpoint] is not None for checkpoint in self._generated)
