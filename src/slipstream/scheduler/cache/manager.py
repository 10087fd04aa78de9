"""CacheManager: the cache of every request over all groups of layers.

`match` looks up a prefix, `reserve` takes pages, `publish` makes pages findable, `release` gives pages back. The
manager knows requests and groups; it does not know steps, rows or budgets. Only the cache package writes a request's
`pages`, `capacity`, `hashes`, `num_published`, `publish_after`, `states` and `next_border`. A model with recurrent
states also has a `StateCache`, which has no pages and cannot run out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.config.config import CacheConfig
from slipstream.contracts.cache_spec import CacheSpec, PagedSpec, WindowSpec
from slipstream.contracts.request import NEVER, Request, WaitFor
from slipstream.contracts.step import NULL_PAGE, TierPlan
from slipstream.scheduler.cache.imports import PageImports
from slipstream.scheduler.cache.matching import Matching, extend_hashes_of
from slipstream.scheduler.cache.pages import CacheKind, PagedCache, Run, WindowCache
from slipstream.scheduler.cache.states import Restore, Save, StateCache
from slipstream.scheduler.cache.tier import CacheTier

KINDS: dict[type[CacheSpec], Callable[..., CacheKind]] = {PagedSpec: PagedCache, WindowSpec: WindowCache}

PUBLISH_PAGES = 4  # pages of generated tokens that are published at once: fewer calls, and still short ones


@dataclass(frozen=True, slots=True)
class Hit:
    """The prefix of a new request whose cache content exists already."""

    length: int  # positions
    pages: Sequence[list[int]]  # per group: whole pages to share; the null page where the request does not need one
    # per group, if any: the page with the remaining positions, copied into the next new page
    partial: Sequence[int] = ()
    # for a model with recurrent states: positions that all groups have cached, and the checkpoint to continue from
    branch: int = 0
    checkpoint: int = -1


class CacheManager:
    def __init__(self, config: CacheConfig, max_drafts: int = 0) -> None:
        """`max_drafts`: of a row in one step."""
        for group in config.groups:
            assert group.spec.page_size == config.page_size, (
                f"sites {group.sites} have pages of {group.spec.page_size} positions, the cache {config.page_size}"
            )
        self.page_size = config.page_size
        self._drops_last_page = config.drops_last_page
        self._following = int(config.drops_last_page)
        # without checkpoints a model with recurrent states cannot continue from cached pages
        self.has_states = config.states is not None
        self.border = 1 if config.states is None else config.states.border  # chunks of prompts end at multiples
        self.prefix_caching = config.prefix_caching and (config.states is None or config.states.num_checkpoints > 0)
        self.states: StateCache | None = None
        if self.prefix_caching and config.states is not None:
            self.states = StateCache(config.states, config.page_size, max_drafts, self._following)
        self.groups: tuple[CacheKind, ...] = tuple(
            KINDS[type(group.spec)](index, group.spec, num_pages, config.step_tokens)
            for index, (group, num_pages) in enumerate(zip(config.groups, config.group_pages, strict=True))
        )
        self.keeps_all = all(group.keeps_all for group in self.groups)
        # groups that need the whole prefix come first: their result limits what the others have to look up
        self._match_order = sorted(range(len(self.groups)), key=lambda n: not self.groups[n].keeps_all)
        self.num_queries = 0  # tokens of requests, counted at their first admission
        self.num_hits = 0  # of those, tokens found in the cache
        self.no_hit = Hit(0, [[] for _ in self.groups])
        self.tier: CacheTier | None = None  # None: pages that are reused for other content are lost
        if config.tier_bytes and self.prefix_caching:
            self.tier = CacheTier(config, self.groups, self._match_order, self.states)
        self.imports: PageImports | None = None  # None: no other engine is asked for pages
        self.draft_gaps: DraftGaps | None = None  # None: no draft model falls behind
        self._matching: Matching | None = None  # of the request that was matched last
        self._holders: set[Request] = set()

    @property
    def num_free(self) -> int:
        """Free pages of the group that has the fewest."""
        return min([group.pool.num_free for group in self.groups], default=NEVER)

    @property
    def num_usable(self) -> int:
        return min((group.pool.num_usable for group in self.groups), default=NEVER)

    def pages_for(self, length: int) -> int:
        """Maximum number of pages that a request of this length holds at the same time in one group."""
        return max((group.pages_for(length) for group in self.groups), default=0)

    def num_table_entries(self, length: int) -> int:
        """Page-table entries of a request of this length, over all groups."""
        return len(self.groups) * -(-length // self.page_size)

    def can_ever_fit(self, length: int) -> bool:
        """Whether a request of this length fits if it is the only one in the cache."""
        return all(group.pages_for(length) <= group.pool.num_usable for group in self.groups)

    def match(self, request: Request) -> Hit:
        """The longest prefix that every group has cached. At least one token is left to compute, which gives logits."""
        if not self.prefix_caching or (not self.groups and self.states is None):
            return self.no_hit
        matching = self._matching
        if matching is not None and matching.is_of(request):
            matching.refresh()
        else:
            matching = self._match_anew(request)
        if self.tier is not None and not matching.is_fetched and self.tier.fetch(matching):
            matching = self._match_anew(request)
            matching.is_fetched = True
        if not matching.num_pages and not matching.branch:
            return self.no_hit
        length, branch = matching.num_pages * self.page_size, matching.branch * self.page_size
        return Hit(length, matching.pages, branch=branch if self.groups else 0, checkpoint=matching.checkpoint)

    @property
    def has_enough_loads(self) -> bool:
        """Whether the plan under construction loads so many pages that no more requests should be admitted."""
        return self.tier is not None and self.tier.has_enough_loads

    def import_pages(self, request: Request) -> WaitFor:
        """Ask other engines for pages of a new request. Returns what it must wait for."""
        if self.imports is None:
            return WaitFor.NOTHING
        return self.imports.enter(request, lambda each, num: self._extend_hashes(each.hashes, each, num))

    def _match_anew(self, request: Request) -> Matching:
        self._drop_match()
        self._matching = Matching(
            request,
            self.groups,
            self._match_order,
            self.page_size,
            self.states,
            self._drops_last_page,
            self._following,
        )
        return self._matching

    def reset(self) -> None:
        """Clears the prefix cache and the second tier. Requests keep the pages that they hold. Between two plans
        only."""
        if self.tier is not None:
            self.tier.reset()
        for group in self.groups:
            group.pool.unpublish_all()
        if self.states is not None:
            self.states.pool.unpublish_all()

    def keep_match(self, request: Request) -> None:
        """The request that was matched last has to wait. Its next match costs only what has changed by then."""
        matching = self._matching
        if matching is not None and matching.request is request and not matching.is_kept:
            matching.keep()

    def drop_match(self, request: Request) -> None:
        """Drops the stored match of a request that will not be matched again."""
        if self._matching is not None and self._matching.request is request:
            self._drop_match()

    def _drop_match(self) -> None:
        if self._matching is not None and self._matching.is_kept:
            self._matching.drop()
        self._matching = None

    def fork(self, request: Request, leader: Request) -> Hit | None:
        """All but the last token of a running leader's prompt, for another sample of the same prompt.

        Whole pages are shared. The page that holds the last token is copied, unless that token is the page's first:
        from there on each sample writes its own tokens. Works without prefix caching too. None if the leader has
        already given back pages that the sample would need, or if the model has recurrent states: the leader's state
        has moved on.
        """
        if self.has_states:
            return None
        length = leader.num_prompt - 1
        whole, rest = divmod(length, self.page_size)
        pages = []
        for group, its_pages in zip(self.groups, leader.pages, strict=True):
            first = group.first_needed(length)
            if NULL_PAGE in its_pages[first : whole + bool(rest)]:
                return None
            pages.append([NULL_PAGE] * first + its_pages[first:whole])
        if self.draft_gaps is not None:
            self.draft_gaps.share(leader, 0, whole + bool(rest))
        request.hashes = leader.hashes[:whole]  # the same tokens
        return Hit(length, pages, [its_pages[whole] for its_pages in leader.pages] if rest else ())

    def admit(self, request: Request, length: int, hit: Hit, keep_free: int = 0, known: int = 0) -> list[Run] | None:
        """Give a new request the pages of its hit and new pages up to `length` positions.

        Returns the entries of its page tables. Returns None and changes nothing if some group has no room for all
        `known` positions of the request with `keep_free` pages left.
        """
        assert not request.pages, f"{request} holds pages already"
        num_entries = -(-length // self.page_size)
        if not all(self._has_room(group, hit, num_entries, keep_free, known) for group in self.groups):
            return None
        self.drop_match(request)
        if not request.num_preemptions and self.prefix_caching:
            self.num_queries += len(request.tokens)
            self.num_hits += hit.length
        changed: list[Run] = []
        for group, shared in zip(self.groups, hit.pages, strict=True):
            group.share(request, shared)  # before `reserve`, which could take these very pages
            group.reserve(request, num_entries)
            changed.append((group.index, 0, request.pages[group.index][:]))
        self._holders.add(request)
        if self.draft_gaps is not None:
            self.draft_gaps.admit(request, hit.length, hit.pages, hit.partial)
        request.num_published = len(hit.pages[0]) if self.groups else 0
        request.capacity = num_entries * self.page_size if self.groups else NEVER
        if self.states is not None:
            self.states.admit(request, hit.length, hit.branch, hit.checkpoint)
        self._set_publish_after(request)
        return changed

    def _has_room(self, group: CacheKind, hit: Hit, num_entries: int, keep_free: int, known: int) -> bool:
        shared = hit.pages[group.index]
        first = group.first_needed(hit.length)  # shared entries before it have the null page
        need = keep_free + max(num_entries - len(shared), group.pages_for(known) - (len(shared) - first))
        if not shared or need > group.pool.num_free:
            return need <= group.pool.num_free
        matching = self._matching if self._matching is not None and self._matching.pages is hit.pages else None
        if matching is not None and matching.lacks(group.index, need):
            return False
        # shared pages that are free now are no longer free once this request holds them
        num_spare = group.pool.num_free - group.pool.num_idle(shared[first:])
        if matching is not None:
            matching.set_spare(group.index, num_spare)
        return need <= num_spare

    def reserve(self, request: Request, length: int) -> list[Run] | None:
        """Give a running request pages for `length` positions. Returns the changed entries of its page tables.

        Pages that no step will read again are given back first. Returns None and changes nothing if some group has too
        few free pages.
        """
        num_entries = -(-length // self.page_size)
        changed: list[Run] = []
        if self.keeps_all:  # rows that began together all come here in the same step
            for group in self.groups:
                if not group.can_reserve(request, num_entries):
                    return None
        elif not self._release_unneeded(request, num_entries, changed):
            return None
        for group in self.groups:
            if (run := group.reserve(request, num_entries)) is not None:
                changed.append(run)
        request.capacity = num_entries * self.page_size if self.groups else NEVER
        self.save_generated(request, length)
        return changed

    def save_generated(self, request: Request, length: int) -> None:
        """The plan under construction computes positions of a decoding request up to `length`: take a checkpoint if
        they reach the next border."""
        if self.states is not None and length >= request.next_border:
            self.states.save_generated(request, length)
            self._set_publish_after(request)

    def _release_unneeded(self, request: Request, num_entries: int, changed: list[Run]) -> bool:
        """Give back pages that no step will read again; False, and nothing has changed, if that is not enough."""
        unneeded = [group.unneeded(request) for group in self.groups]
        for group, (_, _, pages) in zip(self.groups, unneeded, strict=True):
            if not group.can_reserve(request, num_entries, pages):
                return False
        if any(pages for _, _, pages in unneeded):
            self.publish(request)  # so that released pages can still be found
        for group, run in zip(self.groups, unneeded, strict=True):
            if run[2]:
                group.release(request, run)
                changed.append((run[0], run[1], [NULL_PAGE] * len(run[2])))
        return True

    def will_free_pages(self, request: Request) -> bool:
        """Whether the request will give back pages once the steps in flight are committed."""
        launched, committed = request.computed, request.num_committed
        return any(group.first_needed(launched) > group.first_needed(committed) for group in self.groups)

    def publish(self, request: Request) -> None:
        """Make findable the pages all of whose positions are both known to the host and launched."""
        if not self.prefix_caching or (not self.groups and self.states is None):
            return
        full = min(len(request.tokens) - self._following, request.computed) // self.page_size
        if full > request.num_published:
            self._extend_hashes(request.hashes, request, full)
            if self.draft_gaps is not None:
                self.draft_gaps.share(request, request.num_published, full)
            for group in self.groups:
                group.publish(request, slice(request.num_published, full))
            request.num_published = full
        elif request.next_border == NEVER:
            return
        if self.states is not None:
            self.states.publish(request)
        self._set_publish_after(request)

    def _extend_hashes(self, hashes: list[bytes], request: Request, num_pages: int) -> None:
        extend_hashes_of(hashes, request, num_pages, self.page_size, self._following)

    def publish_chunk(self, request: Request) -> None:
        """The plan under construction computes known tokens of the request, up to `computed`: publish their pages and
        take checkpoints."""
        self.publish(request)
        if self.states is not None:
            self.states.save_chunk(request)
            self.save_generated(request, request.computed)  # tokens that a grammar forced

    def take_back(self, request: Request) -> None:
        """The request draws nothing in a step that is committed now, as it sat out or failed."""
        if self.states is not None:
            self.states.take_back(request)
            self._set_publish_after(request)

    def take_copies(self) -> tuple[list[Restore], list[Save]] | None:
        """Restored and saved states of the plan under construction, which is complete then."""
        return None if self.states is None else self.states.take_copies()

    def take_tier_plan(self) -> TierPlan | None:
        """Copies to and from the second tier of the plan under construction, which is complete then."""
        return None if self.tier is None else self.tier.take_plan()

    def release(self, request: Request) -> None:
        """Publish what can be published, then give back all pages of the request."""
        self.publish(request)
        if self.states is not None:
            self.states.release(request)
        for group in self.groups:
            group.release(request)
        self._holders.discard(request)
        request.pages = []
        request.capacity = 0
        request.num_published = 0
        request.publish_after = NEVER

    def unpublish(self, request: Request) -> None:
        """Make everything that the request has published unfindable, whether or not it still holds those pages."""
        if self.tier is not None:
            self.tier.forget(request.hashes)
        if self.states is not None:
            self.states.unpublish(request)
        for group in self.groups:
            for page_hash in request.hashes:
                page = group.pool.find(page_hash)
                if page is not None:
                    group.pool.unpublish(page)

    def _set_publish_after(self, request: Request) -> None:
        # The last known token may not be launched yet, so a page counts once the token after it is known. The offset
        # spreads rows that began together over several steps.
        if self.prefix_caching and self.groups:
            offset = request.number % self.page_size
            request.publish_after = (request.num_published + PUBLISH_PAGES) * self.page_size + offset
        if self.states is not None:
            published_after = self.states.publish_after(request)
            request.publish_after = min(request.publish_after, published_after) if self.groups else published_after

    def check(self) -> None:
        """Assert every invariant. For tests: walks over all pages."""
        if self._matching is not None and self._matching.is_kept:
            self._matching.check()
        if self.tier is not None:
            self.tier.check()
        if self.states is not None:
            self.states.check(self._holders)
        for group in self.groups:
            group.check(self._holders)
            for request in self._holders:
                self._check_hashes(request, group)

    def _check_hashes(self, request: Request, group: CacheKind) -> None:
        """Every published page of the request is found by the hash of the request's tokens, which are all known."""
        hashes: list[bytes] = []
        self._extend_hashes(hashes, request, (len(request.tokens) - self._following) // self.page_size)
        for entry, page in enumerate(request.pages[group.index]):
            if page != NULL_PAGE and (page_hash := group.pool.hash_of(page)) is not None:
                assert entry < len(hashes), f"page {page} of {request} is published, and not all its tokens are known"
                assert page_hash == hashes[entry], f"page {page} of {request} is published under other tokens' hash"


# DraftGaps: shared pages in which entries of a draft model are missing.
#
# A draft model may fall behind the target (`scheduler/drafting.py`): a request has `drafted` leading positions with
# entries of the draft model, NEVER if none is missing. Requests share pages, so a page with missing entries is noted
# when it is published or forked; a request that gets such a page has entries up to that page only.


class DraftGaps:
    def __init__(self, num_groups: int, page_size: int) -> None:
        self._page_size = page_size
        self._incomplete: list[set[int]] = [set() for _ in range(num_groups)]  # per group: pages

    def admit(self, request: Request, length: int, pages: Sequence[list[int]], partial: Sequence[int]) -> None:
        """A request begins with `length` cached positions: in shared pages, and if there are any, in copies of the
        pages `partial`."""
        num_whole = min(map(len, pages), default=0)
        request.drafted = length
        for entry in range(num_whole):
            if any(own[entry] in incomplete for own, incomplete in zip(pages, self._incomplete, strict=True)):
                request.drafted = entry * self._page_size
                return
        if any(page in incomplete for page, incomplete in zip(partial, self._incomplete, strict=False)):
            request.drafted = num_whole * self._page_size

    def share(self, request: Request, first: int, last: int) -> None:
        """From now on other requests may use the pages `first` to `last` - 1 of a request."""
        border = request.drafted // self._page_size
        for pages, incomplete in zip(request.pages, self._incomplete, strict=True):
            incomplete.difference_update(pages[first : min(border, last)])
            incomplete.update(pages[max(border, first) : last])

    def open(self, request: Request, length: int) -> None:
        """The plan under construction computes positions of a request from `length` on without the draft model. Their
        pages may be shared already."""
        if length < request.drafted:
            request.drafted = length
            self.share(request, length // self._page_size, request.num_published)

    def fill(self, request: Request, length: int) -> None:
        """A request gets the missing entries up to `length`; its pages may be shared already."""
        before, request.drafted = request.drafted, length
        for pages, incomplete in zip(request.pages, self._incomplete, strict=True):
            incomplete.difference_update(pages[before // self._page_size : length // self._page_size])
