"""UrlReplicas: servers on other machines, for a proxy that passes requests on over HTTP (`replica_proxy.py`).

A request goes to a server that lists its model, if one does, and of these to the one on which the fewest bytes wait
before it: the bodies of its open requests, plus the part of the request's own body that the server has not had before,
which is what its prefix cache cannot have, plus the time to load its adapter. A server that cannot be reached, or is
not ready, is taken out, and in again when it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools
import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.params.values import is_deep_json

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
        """Asks for /health and takes the server in or out."""
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                code = await self._ask("/health")
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


# UrlModels: the models that a server on another machine lists, and the adapters that it should have loaded.
#
# /v1/models has the names, and the base model of each adapter. It is read with the API key of the request that needs
# it, since the proxy has none. What a server has loaded is known by the requests that were sent there, so it may
# differ; then only the choice of a server is worse.

MAX_ADAPTERS = 8
"""Adapters that a server is assumed to have loaded: the last ones of the requests that were sent there."""
_MAX_BYTES = 2**22  # of a list
_OLD_SECONDS = 30.0  # a list is read again, by the next request that names a model
_AGAIN_SECONDS = 1.0  # the same, for a name that no server lists
LIST_CHANGES = (b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter")
"""Routes that change a list."""
_KEYS = (b"authorization", b"x-api-key")


class UrlModels:
    def __init__(self) -> None:
        self._names: dict[str, bool] = {}  # whether each is an adapter
        self._loaded: OrderedDict[str, None] = OrderedDict()  # adapters, the least recently used first
        self._read_at = float("-inf")

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def num_loaded(self) -> int:
        return len(self._loaded)

    def must_load(self, name: str | None) -> bool:
        return name is not None and self._names.get(name, False) and name not in self._loaded

    def note(self, name: str | None) -> None:
        """A request for this model was sent."""
        if name is not None and self._names.get(name):
            self._loaded[name] = None
            self._loaded.move_to_end(name)
            while len(self._loaded) > MAX_ADAPTERS:
                self._loaded.popitem(last=False)

    def clear(self) -> None:
        """The server may have been started again."""
        self._names = {}
        self._loaded.clear()
        self.expire()

    def is_due(self, *, is_listed: bool) -> bool:
        """Whether to read the list before a request. `is_listed`: some server lists its model."""
        return time.monotonic() - self._read_at > (_OLD_SECONDS if is_listed else _AGAIN_SECONDS)

    def expire(self) -> None:
        """The list has changed, so it is read again before the next request."""
        self._read_at = float("-inf")

    def asked(self) -> None:
        """The list is being read; whether or not the server sends it, it is not asked again at once."""
        self._read_at = time.monotonic()

    def update(self, answer: ListAnswer) -> None:
        """Keeps the list, unless the server has sent an error or something else."""
        if answer.parser.get_status_code() != 200:
            return
        try:
            listed = msgspec.json.decode(answer.body, type=_List)
        except msgspec.MsgspecError:
            return
        self._names = {card.id: bool(card.parent) for card in listed.data}
        for name in [name for name in self._loaded if not self._names.get(name)]:
            del self._loaded[name]


class ListAnswer:
    """Callbacks of the parser of an answer of /v1/models."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.is_complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > _MAX_BYTES:
            raise ValueError("the list of models is too long")

    def on_message_complete(self) -> None:
        self.is_complete = True


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _List(msgspec.Struct):
    data: list[_Card]


class _Body(msgspec.Struct):
    model: str | None = None
    lora_name: str | None = None  # of a request that loads or unloads an adapter


def named_model(body: bytes) -> str | None:
    """The model that a request names; None if it names none."""
    if is_deep_json(body):
        return None  # the server will refuse it
    try:
        found = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found.model or found.lora_name


def key_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The headers of a request that have its API key."""
    return b"".join(b"%s: %s\r\n" % each for each in headers if each[0].lower() in _KEYS)


# PrefillFirst: has a prompt computed by a prefill server before its request goes to a decode server.
#
# The prefill server gets the same request, limited to one token, and keeps the pages of the prompt. The decode server
# asks it for these pages by their hashes (`handoff/client.py`). If a prefill server fails, the decode server computes
# the prompt.

log = logging.getLogger("slipstream.proxy")

PATHS = (b"/v1/completions", b"/v1/chat/completions")
MAX_SECONDS = 300.0
# fields that do not change the prompt, and cost time, conflict with a single token or need another one of these
_DROPPED = (
    "stream", "stream_options", "n", "best_of", "use_beam_search", "length_penalty", "max_tokens",
    "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs", "logprob_token_ids",
    "return_tokens_as_token_ids", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "guided_whitespace_pattern", "stop", "logit_bias", "thinking_token_budget",
)  # fmt: skip


class PassedRequest(Protocol):
    """A request of a client that is passed on."""

    method: bytes

    @property
    def path(self) -> bytes: ...
    def header(self, authority: str, size: int) -> bytes: ...


class PrefillFirst:
    def __init__(self, replicas: UrlReplicas) -> None:
        self.replicas = replicas
        self.num_prefilled = self.num_failed = 0

    async def run(self, request: PassedRequest, body: bytes) -> None:
        """Returns when the prompt is computed, or when it will not be."""
        short = shortened(request.path, body) if request.method == b"POST" else None
        if short is None or (chosen := self.replicas.choose(body, ())) is None:
            return
        replica, hashes = chosen
        replica.begin(hashes, len(body))
        try:
            async with asyncio.timeout(MAX_SECONDS):
                code = await _post(replica, request.header(replica.authority, len(short)) + short)
            self.num_prefilled += code == b"200"
        except (OSError, TimeoutError) as error:
            self.num_failed += 1
            replica.set_ready(False)
            log.warning("prefill server %s was lost, so the prompt is computed again: %s", replica.url, error)
        finally:
            replica.end(len(body))


def shortened(path: bytes, body: bytes) -> bytes | None:
    """The request with the same prompt and one token; None if it has no prompt that another engine can continue."""
    if path not in PATHS or is_deep_json(body):
        return None
    try:
        fields: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(fields, dict) or fields.get("echo") or fields.get("prompt_logprobs") is not None:
        return None
    kept = {name: value for name, value in fields.items() if name not in _DROPPED}
    return msgspec.json.encode(kept | {"max_tokens": 1})


async def _post(replica: UrlReplica, request: bytes) -> bytes:
    """Sends a request and reads its answer to the end. Returns the status code. Raises OSError."""
    reader, writer = await replica.connect()
    try:
        writer.write(request)
        code = b"".join((await reader.readline()).split(b" ")[1:2])
        while await reader.read(2**16):
            pass
    finally:
        writer.close()
    if not code:
        raise ConnectionError("the connection has ended")
    return code
