"""UrlReplicas: servers on other machines, for a proxy that passes requests on over HTTP (`replica_proxy.py`).

A request goes to a server that lists its model, if one does, and of these to the one on which the fewest bytes wait
before it: the bodies of its open requests, plus the part of the request's own body that the server has not had before,
which is what its prefix cache cannot have, plus the time to load its adapter. A server that cannot be reached, or is
not /ready, is taken out, and in again when it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from urllib.parse import urlsplit

import httptools

from slipstream.base.errors import InvalidOption
from slipstream.serve.http.url_models import ListAnswer, UrlModels

status = logging.getLogger("slipstream.status")

BLOCK = 256  # bytes of a body that are compared at once
MAX_BLOCKS = 2**16  # remembered for each server
ADAPTER_BYTES = 2048
"""Cost of a request whose adapter has to be loaded: that of as many bytes."""
_CONNECT_SECONDS = 5.0
_HEALTH_SECONDS = 5.0


class UrlReplica:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise InvalidOption(f"a replica URL is {url!r}; give one like http://10.0.0.2:8000, without a path")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.encrypted = parts.scheme == "https"
        self.port = parts.port or (443 if self.encrypted else 80)
        self.is_ready = False
        self.open_bytes = 0  # bodies of open requests, and a byte for each
        self.num_open = 0
        self.models = UrlModels()
        self._blocks: OrderedDict[int, None] = OrderedDict()  # hashes of beginnings of bodies

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError or TimeoutError."""
        opening = asyncio.open_connection(self.host, self.port, ssl=True if self.encrypted else None)
        return await asyncio.wait_for(opening, _CONNECT_SECONDS)

    async def check(self) -> bool:
        """Asks for /ready, or /health of a server without /ready, and takes the server in or out."""
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                code = await self._ask("/ready")
                code = await self._ask("/health") if code == b"404" else code
        except (OSError, TimeoutError):
            code = b""
        self.set_ready(code == b"200")
        return self.is_ready

    async def _ask(self, path: str) -> bytes:
        """The status code of a GET; empty: the server sent none."""
        reader, writer = await self.connect()
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {self.authority}\r\nConnection: close\r\n\r\n".encode())
            return b"".join((await reader.readline()).split(b" ")[1:2])
        finally:
            writer.close()

    async def read_models(self, key: bytes) -> None:
        """Asks for /v1/models. `key`: header lines with the API key. A server that does not answer is no error here."""
        self.models.asked()
        answer = ListAnswer()
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                reader, writer = await self.connect()
                try:
                    start = f"GET /v1/models HTTP/1.1\r\nHost: {self.authority}\r\nConnection: close\r\n"
                    writer.write(start.encode() + key + b"\r\n")
                    while not answer.is_complete and (data := await reader.read(2**16)):
                        answer.parser.feed_data(data)
                finally:
                    writer.close()
        except (OSError, TimeoutError, httptools.HttpParserError):
            return
        if answer.is_complete:
            self.models.update(answer)

    def set_ready(self, ready: bool) -> None:
        if ready != self.is_ready:
            self.is_ready = ready
            if ready:
                status.info("replica %s is ready", self.url)
            else:
                self._blocks.clear()  # it may have been started again
                self.models.clear()
                status.error("replica %s is out: it cannot be reached, or is not ready", self.url)

    def cost(self, hashes: Sequence[int], size: int, model: str | None = None) -> tuple[int, int]:
        """Bytes that wait before a request with this body, and the number of adapters where it needs one more."""
        known = 0
        for each in hashes:
            if each not in self._blocks:
                break
            known += BLOCK
        must_load = self.models.must_load(model)
        num_bytes = self.open_bytes + size - known + ADAPTER_BYTES * must_load
        return num_bytes, self.models.num_loaded * must_load

    def begin(self, hashes: Sequence[int], size: int, model: str | None = None) -> None:
        self.models.note(model)
        self.num_open += 1
        self.open_bytes += size + 1
        for each in hashes:
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)

    def end(self, size: int) -> None:
        self.num_open -= 1
        self.open_bytes -= size + 1


class UrlReplicas:
    def __init__(self, urls: Sequence[str], interval: float = 2.0) -> None:
        """`interval`: seconds between two checks of a server."""
        self.all = [UrlReplica(url) for url in urls]
        if len({replica.authority for replica in self.all}) < len(self.all):
            raise InvalidOption("a replica URL is given twice; give each server once")
        self.interval = interval
        self._changed = asyncio.Event()

    async def watch(self) -> None:
        """Checks all servers again and again, until it is cancelled."""
        await asyncio.gather(*(self._watch(replica) for replica in self.all))

    async def _watch(self, replica: UrlReplica) -> None:
        while True:
            await replica.check()
            self._changed.set()
            await asyncio.sleep(self.interval)

    async def find_model(self, model: str, key: bytes) -> None:
        """Reads the models of the ready servers, if a request for this model needs them. `key`: header lines with the
        API key of the request."""
        ready = [replica for replica in self.all if replica.is_ready]
        is_listed = any(model in replica.models for replica in ready)
        due = [replica for replica in ready if replica.models.is_due(is_listed=is_listed)]
        if due:
            await asyncio.gather(*(replica.read_models(key) for replica in due))

    def choose(
        self, body: bytes, tried: Sequence[UrlReplica], model: str | None = None
    ) -> tuple[UrlReplica, list[int]] | None:
        """The server for a request, and the hashes of its body; None: no server that was not tried is ready."""
        hashes = block_hashes(body)
        ready = [replica for replica in self.all if replica.is_ready and replica not in tried]
        if not ready:
            return None
        having = [replica for replica in ready if model is not None and model in replica.models]
        return min(having or ready, key=lambda replica: replica.cost(hashes, len(body), model)), hashes

    async def until_ready(self, seconds: float) -> bool:
        """Waits until a server is ready; False: none within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not any(replica.is_ready for replica in self.all):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


def block_hashes(body: bytes) -> list[int]:
    """A hash for each whole block of a body, which depends on all blocks before it."""
    hashes, last = [], 0
    for first in range(0, len(body) - BLOCK + 1, BLOCK):
        last = hash((last, body[first : first + BLOCK]))
        hashes.append(last)
    return hashes
