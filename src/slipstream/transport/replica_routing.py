"""Routing of requests to replicas: the replica on which a prompt has to wait for the fewest tokens.

The cost of a replica is the number of tokens that it has to compute before the prompt, plus the tokens of the prompt
that are not in its prefix cache, plus the time to load its adapter if the replica does not have it. Cached prefixes are
known by page hashes: a bounded set of the hashes of the prompts that were sent to the replica; adapters by the requests
that were sent there. The replica itself is not asked, so both may differ from what it has; then only the choice is
worse, never a result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from slipstream.contracts.messages import Submit
from slipstream.params.lora import LoRARequest
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.cache.matching import extend_hashes

MAX_PAGES = 512
"""Pages of a prompt that are hashed, from its start: bounds the time on the event loop to about a millisecond."""
DECODE_COST = 32
"""Cost in tokens of a request that decodes, per sample."""
ADAPTER_COST = 512
"""Cost in tokens of a prompt whose adapter has to be loaded. Other requests of the replica do not wait for it, so it is
not part of the replica's load."""


class ReplicaLoad:
    """Requests that were sent to one replica and have not finished, and the prefixes and adapters that it should
    have."""

    def __init__(self) -> None:
        self.num_open = 0  # requests
        self.num_tokens = 0  # cost of all open requests
        self._hashes: OrderedDict[bytes, None] = OrderedDict()  # of pages, the least recently used first
        self._adapters: OrderedDict[LoRARequest, None] = OrderedDict()  # the same

    def cached_pages(self, hashes: Sequence[bytes]) -> int:
        """The number of leading pages that were sent to this replica before."""
        for index, page in enumerate(hashes):
            if page not in self._hashes:
                return index
        return len(hashes)

    def note_pages(self, hashes: Iterable[bytes], limit: int) -> None:
        """Adds the pages of a prompt as the most recently used ones. `limit`: pages of the replica's cache."""
        for page in reversed(list(hashes)):  # the first page of a chain is evicted last
            self._hashes[page] = None
            self._hashes.move_to_end(page)
        while len(self._hashes) > limit:
            self._hashes.popitem(last=False)

    def has_adapter(self, adapter: LoRARequest | None) -> bool:
        return adapter is None or adapter in self._adapters

    @property
    def num_adapters(self) -> int:
        return len(self._adapters)

    def note_adapter(self, adapter: LoRARequest | None, limit: int) -> None:
        """Adds the adapter of a prompt as the most recently used one. `limit`: adapters that a replica has at once."""
        if adapter is not None:
            self._adapters[adapter] = None
            self._adapters.move_to_end(adapter)
        while len(self._adapters) > limit:
            self._adapters.popitem(last=False)

    def forget_pages(self) -> None:
        self._hashes.clear()


class RequestCost:
    """The share of one request in its replica's load. It falls when the first token has come."""

    def __init__(self, load: ReplicaLoad, num_tokens: int, num_samples: int) -> None:
        self._load = load
        self._num_tokens = num_tokens
        self._num_samples = num_samples
        self._decodes = False
        load.num_open += 1
        load.num_tokens += num_tokens

    def decode(self) -> None:
        """The prompt is computed."""
        if not self._decodes:
            self._decodes = True
            self._set(DECODE_COST * self._num_samples)

    def end(self) -> None:
        self._set(0)
        self._load.num_open -= 1

    def _set(self, num_tokens: int) -> None:
        self._load.num_tokens += num_tokens - self._num_tokens
        self._num_tokens = num_tokens


def page_hashes(submit: Submit, page_size: int) -> list[bytes]:
    """Hashes of the prompt's full pages; none if the model has no pages. Prompts with different adapters or cache
    salts share no page."""
    hashes: list[bytes] = []
    if page_size:
        num_pages = min(len(submit.prompt_token_ids) // page_size, MAX_PAGES)
        salt = submit.cache_salt if submit.lora is None else f"{submit.cache_salt}\0{submit.lora}"
        extend_hashes(hashes, submit.prompt_token_ids, num_pages, page_size, salt, images=submit.images)
    return hashes


def choose_replica(
    loads: Sequence[ReplicaLoad], submits: Sequence[Submit], page_size: int, max_pages: int, max_adapters: int = 0
) -> tuple[int, list[RequestCost]]:
    """Returns the index of the replica for these prompts, and the cost of each, which is added to the replica's load.
    `max_adapters`: that a replica has at once.

    Among replicas with equal cost, the one with the fewest adapters is chosen if an adapter has to be loaded, then the
    one with the fewest open requests, then the first.
    """
    chains = [page_hashes(submit, page_size) for submit in submits]
    total = sum(len(submit.prompt_token_ids) for submit in submits)

    adapters = {submit.lora for submit in submits}

    def cost(load: ReplicaLoad) -> tuple[int, int, int]:
        cached = page_size * sum(load.cached_pages(chain) for chain in chains)
        num_missing = sum(not load.has_adapter(adapter) for adapter in adapters)
        num_tokens = load.num_tokens + total - cached + ADAPTER_COST * num_missing
        return num_tokens, load.num_adapters if num_missing else 0, load.num_open

    chosen = min(range(len(loads)), key=lambda index: cost(loads[index]))
    load = loads[chosen]
    costs = []
    for submit, chain in zip(submits, chains, strict=True):
        num_new = len(submit.prompt_token_ids) - page_size * load.cached_pages(chain)
        load.note_pages(chain, max_pages)
        load.note_adapter(submit.lora, max_adapters)
        decoded = submit.num_samples if isinstance(submit.params, SamplingParams) else 0
        costs.append(RequestCost(load, num_new + DECODE_COST * decoded, decoded))
    return chosen, costs
