"""RemoteRanks: ranks that were started on other nodes and connect to rank 0 over TCP."""

from __future__ import annotations

import socket

import msgspec
import torch
from torch.distributed import TCPStore

from slipstream.base.errors import EngineDead
from slipstream.config.config import EngineConfig
from slipstream.device.collectives import TIMEOUT, Group, announce_end
from slipstream.dist.plan_socket import PlanSockets
from slipstream.engine.rank_link import RankLink, RankStart, accept_rank
from slipstream.engine.ranks import END, Ranks

_CONNECT_SECONDS = 120.0  # for a rank to connect, before it loads its part
_EXIT_SECONDS = 5.0


class RemoteRanks(Ranks):
    plans: PlanSockets

    def __init__(self, config: EngineConfig, link: RankLink) -> None:
        """Waits until all ranks have connected, and sends each its part of the configuration; they load it
        meanwhile."""
        super().__init__()
        self.num_ranks = config.model.num_ranks
        found: dict[int, socket.socket] = {}
        with socket.socket(fileno=link.listener) as listener:
            self._address = str(listener.getsockname()[0])
            listener.settimeout(_CONNECT_SECONDS)
            while len(found) < self.num_ranks - 1:
                try:
                    rank, sock = accept_rank(listener, link.secret)
                except TimeoutError:
                    missing = sorted(set(range(1, self.num_ranks)) - set(found))
                    raise EngineDead(f"ranks {missing} did not connect within {_CONNECT_SECONDS:g} s") from None
                found[rank] = sock
        self.plans = PlanSockets([found[rank] for rank in sorted(found)])
        self._store = TCPStore(self._address, 0, None, True, TIMEOUT, wait_for_workers=False)
        for rank, sock in found.items():
            start = RankStart(config.of_rank(rank), self._address, self._store.port)
            data = msgspec.msgpack.encode(start)
            sock.sendall(len(data).to_bytes(8, "little") + data)

    def wait_until_loaded(self) -> None:
        if (rank := self.plans.wait_until_ready()) is not None:
            raise EngineDead(f"rank {rank} did not start; see its last lines in the log of its node")

    def open_group(self, device: torch.device) -> Group:
        return Group(0, self.num_ranks, self._store, self._address, device)

    def end_files(self) -> list[int]:
        return self.plans.files

    def dead_rank(self, seconds: float = 0.0) -> str | None:
        rank = self.plans.ended(seconds)
        return None if rank is None else f"rank {rank} has ended: its node or its process was lost"

    def end_others(self, how: str) -> None:
        announce_end(self._store.clone(), self.num_ranks, how)  # the other may wait for an answer
        self.plans.hang_up()  # a rank exits when its connection ends

    def close(self) -> None:
        self._stop_watching()
        try:
            self.plans.write(END)
            self.plans.wait_until_ended(_EXIT_SECONDS)  # they may still read this one's memory
        except EngineDead:
            pass
        if self.group is not None:
            self.group.abort()
        self.plans.close()
        self._close_files()

    def kill(self) -> None:
        self._stop_watching()
        self.plans.close()  # a rank exits when its connection ends
        self._close_files()
