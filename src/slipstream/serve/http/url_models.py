"""UrlModels: the models that a server on another machine lists, and the adapters that it should have loaded.

/v1/models has the names, and the base model of each adapter. It is read with the API key of the request that needs it,
since the proxy has none. What a server has loaded is known by the requests that were sent there, so it may differ; then
only the choice of a server is worse.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

import httptools
import msgspec

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
    try:
        found = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found.model or found.lora_name


def key_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The headers of a request that have its API key."""
    return b"".join(b"%s: %s\r\n" % each for each in headers if each[0].lower() in _KEYS)
