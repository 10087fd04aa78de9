"""Handoff: what one engine exchanges with others: it serves pages, fetches them, or both."""

from __future__ import annotations

from typing import Protocol

from slipstream.config.config import EngineConfig, TransferConfig
from slipstream.engine.page_client import ClientMemory, PageClient, RankClients
from slipstream.engine.page_server import PageServer, RankServers
from slipstream.engine.page_wire import identity_of
from slipstream.scheduler.cache.imports import PageImports
from slipstream.scheduler.cache.tier import CacheTier


class PageRanks(RankServers, RankClients, Protocol):
    """The other ranks of a model: `RankPages`."""

    def close(self) -> None: ...


class Handoff:
    def __init__(
        self,
        config: EngineConfig,
        transfer: TransferConfig,
        tier: CacheTier,
        memory: ClientMemory,
        ranks: PageRanks | None = None,
    ) -> None:
        """`ranks`: the other ranks of the model, if there are any."""
        identity = identity_of(config)
        self._ranks = ranks
        self.server = None if transfer.listen is None else PageServer(transfer.listen, identity, tier, memory, ranks)
        self._client: PageClient | None = None
        self.imports: PageImports | None = None
        if transfer.peers:
            self._client = PageClient(transfer.peers, identity, memory, ranks)
            self.imports = PageImports(tier, self._client, transfer.timeout)

    def close(self) -> None:
        """`imports` is closed with the other background work of the core."""
        if self.server is not None:
            self.server.close()
        if self._client is not None:
            self._client.close()
        if self._ranks is not None:
            self._ranks.close()
