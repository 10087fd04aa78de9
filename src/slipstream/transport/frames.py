"""The line between a front end and a core in another process: which messages pass, and how they are framed.

A frame is a length and a msgpack list of messages. Nothing that is decoded can run code, and whatever the bytes are,
decoding gives messages of these types or raises `FrameError`. Messages that are too large for one frame go in several;
a single message that is too large for a frame is not sent, and its sender gets `TooLarge`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from slipstream import errors
from slipstream.engine.model_description import ModelDescription
from slipstream.errors import SlipstreamError
from slipstream.messages import Abort, Output, Submit, SubmitAll
from slipstream.metrics.lane import LaneStats
from slipstream.request import FinishReason

MAX_FRAME = 2**29  # bytes; a frame that says more is no frame, and text never says less
MAX_RESULT = MAX_FRAME - 2**16  # bytes of the numbers in one output; the rest of it is a name and a few counts
_HEAD = 4  # bytes of the length, little-endian
_LIST = 16  # bytes around the messages of a frame, at most


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request that the core did not take, and why."""

    request_id: str
    kind: str  # name of the exception
    message: str

    @classmethod
    def of(cls, request_id: str, error: Exception) -> Refused:
        return cls(request_id, type(error).__name__, str(error))

    def error(self) -> Exception:
        """The exception again if it is one of ours; else nobody meant it, and its words are not for everybody."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, SlipstreamError):
            return kind(self.message)
        return RuntimeError(f"the engine core failed on a request: {self.kind}: {self.message}")


class Begun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Requests that wait no more: their prompts are being computed."""

    request_ids: list[str]


class AbortAll(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Abort every request of the other front ends. The core hands it on to each of them."""

    call: str  # tells calls apart


class AbortedAll(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How many requests that ended: from a front end its own, from the core those of all others."""

    call: str
    count: int


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From the supervisor: a new front end. The core's end of its socket comes with the bytes of this frame."""


class Loading(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Where the start stands, in words."""

    stage: str


class Opening(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The models are found; tokenizers may be loaded while weights are."""

    models: list[ModelDescription]
    pid: int  # of the core


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Requests are taken from here on."""


class Pulse(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How the core is doing: sent now and then while it works, and when it comes to rest."""

    lanes: list[LaneStats] = []  # of each model


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core is lost: the root cause in one line."""

    cause: str


ToCore = Submit | SubmitAll | Abort | AbortAll | AbortedAll
FromCore = Output | Begun | Refused | AbortAll | AbortedAll | Loading | Opening | Ready | Pulse | Failed

Message = TypeVar("Message")


class FrameError(Exception):
    """Bytes that are no messages. Between our own processes this is a bug, or the end of one of them."""


class Frames(Generic[Message]):
    """Bytes, however they were cut, to lists of messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[Message]]) -> None:
        self._decode = decoder.decode
        self._parts: list[bytes] = []  # of a frame that is not whole yet
        self._missing = _HEAD  # bytes without which nothing more can be said

    def push(self, data: bytes) -> list[Message]:
        """The messages that these bytes complete."""
        if self._parts:
            self._parts.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return []  # a large frame in many parts is joined once
            data = b"".join(self._parts)
            self._parts.clear()
        messages: list[Message] = []
        start, end = 0, len(data)
        while end - start >= _HEAD:
            length = int.from_bytes(data[start : start + _HEAD], "little")
            if length > MAX_FRAME:
                raise FrameError(f"a frame of {length} bytes was announced; {MAX_FRAME} are the most")
            stop = start + _HEAD + length
            if stop > end:
                break
            try:
                messages += self._decode(data[start + _HEAD : stop])
            except (msgspec.MsgspecError, SlipstreamError, RecursionError, UnicodeDecodeError) as error:
                raise FrameError(f"a frame of {length} bytes holds no messages: {error}") from None
            start = stop
        if start < end:
            self._parts.append(data[start:] if start else data)
            whole = _HEAD if end - start < _HEAD else _HEAD + length
            self._missing = whole - (end - start)
        return messages


def to_core_frames() -> Frames[ToCore | Join]:
    return Frames(msgspec.msgpack.Decoder(list[ToCore | Join]))


def from_core_frames() -> Frames[FromCore]:
    return Frames(msgspec.msgpack.Decoder(list[FromCore]))


class TooLarge(Exception):
    """A message that no frame can hold."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a message has {size} bytes, {MAX_FRAME} are the most")
        self.size = size


def _plain(value: object) -> object:
    """Numbers and texts of other kinds, numpy's for one, as Python's own."""
    for kind in (float, int, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} is no plain value")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def encoded(message: ToCore | FromCore) -> msgspec.Raw:
    """One message, to be framed later."""
    data = _encode(message)
    if len(data) > MAX_FRAME - _LIST:
        raise TooLarge(len(data))
    return msgspec.Raw(data)


def frame(messages: Sequence[ToCore | Join | msgspec.Raw] | Sequence[FromCore]) -> bytes:
    """As one frame."""
    body = _encode(messages)
    if len(body) > MAX_FRAME:
        raise TooLarge(len(body))
    return len(body).to_bytes(_HEAD, "little") + body


def frames(
    messages: Sequence[ToCore | msgspec.Raw] | Sequence[FromCore], instead: Callable[[Any, int], FromCore] | None = None
) -> Iterator[bytes]:
    """As one frame, or as several where one cannot hold them.

    A message that no frame can hold is replaced by `instead(message, size)`; without that, TooLarge is raised.
    """
    try:
        whole = frame(messages)
    except TooLarge as error:
        if len(messages) > 1:
            half = len(messages) // 2
            yield from frames(messages[:half], instead)
            yield from frames(messages[half:], instead)
            return
        if instead is None:
            raise
        whole = frame([instead(messages[0], error.size)])
    yield whole


def without_numbers(output: Output, size: int) -> Output:
    """The end of a request whose result no frame can hold. A last resort: front ends refuse such requests."""
    fact = f"the result has {size} bytes, and {MAX_FRAME} can be sent to a front end"
    error = f"{fact}; send a shorter prompt or ask for fewer dimensions"
    return Output(output.request_id, output.sample, [], finish_reason=FinishReason.ERROR, error=error)
