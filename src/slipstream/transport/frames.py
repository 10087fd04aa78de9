"""The wire format between a front end and a core in another process: message types, and their frames.

A frame is a length and a msgpack list of messages. Decoding gives messages of these types or raises `FrameError`, for
any bytes; it cannot run code. Messages that do not fit one frame are sent in several. A single message that is larger
than a frame is not sent, and its sender gets `TooLarge`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

from slipstream.base import errors
from slipstream.base.errors import SlipstreamError, UserError
from slipstream.contracts.messages import Abort, Output, Submit, SubmitAll
from slipstream.contracts.request import FinishReason
from slipstream.engine.model_description import ModelDescription
from slipstream.metrics.stats import LaneStats, ReplicaStats

MAX_FRAME = 2**29  # bytes; a larger length means that the stream is corrupt (four bytes of text are larger)
MAX_RESULT = MAX_FRAME - 2**16  # bytes of the values in one output; the rest of a message is small
_HEADER = 4  # bytes of the length, little-endian
_LIST = 16  # upper bound of msgpack's own bytes around the messages of a frame


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request that the core did not accept, and the error."""

    request_id: str
    kind: str  # name of the exception
    message: str
    param: str | None = None  # the parameter that a UserError is about

    @classmethod
    def of(cls, request_id: str, error: BaseException) -> Refused:
        return cls(request_id, type(error).__name__, str(error), getattr(error, "param", None))

    def error(self) -> Exception:
        """The same exception if it is a SlipstreamError, else a RuntimeError, whose text clients must not see."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, UserError):
            return kind(self.message, param=self.param)
        if isinstance(kind, type) and issubclass(kind, SlipstreamError):
            return kind(self.message)
        return RuntimeError(f"the engine core failed on a request: {self.kind}: {self.message}")


class Begun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Requests that have left the queue: their prompts are being computed."""

    request_ids: list[str]


class AbortAll(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Aborts every request of the other front ends. The core passes it on to each of them."""

    call: str  # an id


class AbortedAll(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The number of aborted requests: of one front end, or, from the core, of all others together."""

    call: str
    count: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the core: clear the prefix caches of all models. The core sends the same message back when it is done."""

    call: str
    preempts: bool = False  # running requests lose their pages too, and are computed again


class Inspect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the core: send a recording of the last steps, or times of steps."""

    call: str
    what: Literal["record", "steps"]
    since: int = 0  # of steps: the first number; below 0: no steps
    model: str = ""  # of a recording: empty for the first model
    redact: bool = False  # of a recording


class Inspected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core's answer to `Inspect`."""

    call: str
    data: bytes
    error: str | None = None


class Control(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the core: sleep, wake up, read weights from files, or only answer."""

    call: str
    action: Literal["sleep", "wake_up", "update_weights", "ask"]
    level: int = 1  # of sleep
    tags: list[str] | None = None  # of wake_up; None: all
    path: str | None = None  # of update_weights; None: the model's own files
    model: str | None = None  # of update_weights; None: the first one


class Controlled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core's answer to `Control`."""

    call: str
    is_asleep: bool
    refused: Refused | None = None  # with an empty request id


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From the supervisor: a new front end. The core's end of its socket is sent with this frame (SCM_RIGHTS)."""


class Loading(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The stage of the start, as text."""

    stage: str


class ModelDescriptions(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The descriptions of the models, sent before weights load, so that front ends load tokenizers meanwhile."""

    models: list[ModelDescription]
    pid: int  # of the core


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core accepts requests."""


class Pulse(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Statistics of the core: sent before Ready, at an interval while it has requests, and when they have ended."""

    lanes: list[LaneStats] = []  # one per model and replica
    replicas: list[ReplicaStats] = []  # empty if there is one core only
    is_asleep: bool = False  # or without weights: no request can run


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core has failed; `cause` is the root cause in one line."""

    cause: str
    refused: Refused | None = None  # the error that the start raised on purpose, with an empty request id

    @classmethod
    def at_start(cls, cause: str, error: BaseException) -> Failed:
        on_purpose = isinstance(error, SlipstreamError) and not isinstance(error, errors.EngineDead)
        return cls(cause, Refused.of("", error) if on_purpose else None)

    def error(self) -> errors.EngineDead:
        """Chained to the error that the start raised on purpose; see `start_error`."""
        dead = errors.EngineDead(self.cause)
        dead.__cause__ = None if self.refused is None else self.refused.error()
        return dead


def start_error(error: BaseException) -> BaseException:
    """Returns the error for a caller that waits for the start: the one that it gets from a core of its own process."""
    return error.__cause__ if isinstance(error.__cause__, SlipstreamError) else error


def refused_option(error: BaseException) -> errors.UserError | None:
    """The error of an option that the start refused; None if it failed for another reason."""
    refused = start_error(error)
    return refused if isinstance(refused, errors.UserError) else None


ToCore = Submit | SubmitAll | Abort | AbortAll | AbortedAll | ResetPrefixCache | Inspect | Control
FromCore = (
    Output
    | Begun
    | Refused
    | AbortAll
    | AbortedAll
    | ResetPrefixCache
    | Inspected
    | Controlled
    | Loading
    | ModelDescriptions
    | Ready
    | Pulse
    | Failed
)

Message = TypeVar("Message")


class FrameError(Exception):
    """Bytes that do not decode. Between our own processes this is a bug, or one of them was killed."""


class Frames(Generic[Message]):
    """Decodes a stream of bytes, in pieces of any size, into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[Message]]) -> None:
        self._decode = decoder.decode
        self._parts: list[bytes] = []  # of an incomplete frame
        self._missing = _HEADER  # bytes until the next attempt to decode

    def push(self, data: bytes) -> list[Message]:
        """Returns the messages that these bytes complete."""
        if self._parts:
            self._parts.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return []  # so that the parts of a large frame are joined only once
            data = b"".join(self._parts)
            self._parts.clear()
        messages: list[Message] = []
        start, end = 0, len(data)
        while end - start >= _HEADER:
            length = int.from_bytes(data[start : start + _HEADER], "little")
            if length > MAX_FRAME:
                raise FrameError(f"a frame has the length {length}; the limit is {MAX_FRAME} bytes")
            stop = start + _HEADER + length
            if stop > end:
                break
            try:
                messages += self._decode(data[start + _HEADER : stop])
            except (msgspec.MsgspecError, SlipstreamError, RecursionError, UnicodeDecodeError) as error:
                raise FrameError(f"a frame of {length} bytes does not decode: {error}") from None
            start = stop
        if start < end:
            self._parts.append(data[start:] if start else data)
            whole = _HEADER if end - start < _HEADER else _HEADER + length
            self._missing = whole - (end - start)
        return messages


def to_core_frames() -> Frames[ToCore | Join]:
    return Frames(msgspec.msgpack.Decoder(list[ToCore | Join]))


def from_core_frames() -> Frames[FromCore]:
    return Frames(msgspec.msgpack.Decoder(list[FromCore]))


class TooLarge(Exception):
    """A message that is larger than a frame."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a message has {size} bytes, the limit is {MAX_FRAME}")
        self.size = size


def _plain(value: object) -> object:
    """Converts subclasses of float, int and str, such as numpy's, to Python's own types."""
    for kind in (float, int, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} is not a number or a string")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def encoded(message: ToCore | FromCore) -> msgspec.Raw:
    """Encodes one message, to be framed later."""
    data = _encode(message)
    if len(data) > MAX_FRAME - _LIST:
        raise TooLarge(len(data))
    return msgspec.Raw(data)


def frame(messages: Sequence[ToCore | Join | msgspec.Raw] | Sequence[FromCore]) -> bytes:
    """Encodes messages as one frame."""
    payload = _encode(messages)
    if len(payload) > MAX_FRAME:
        raise TooLarge(len(payload))
    return len(payload).to_bytes(_HEADER, "little") + payload


def frames(
    messages: Sequence[ToCore | msgspec.Raw] | Sequence[FromCore], instead: Callable[[Any, int], FromCore] | None = None
) -> Iterator[bytes]:
    """Encodes messages as one frame, or several where they do not fit one.

    A message that is larger than a frame is replaced by `instead(message, size)`; without that, TooLarge is raised.
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


def too_large_output(output: Output, size: int) -> Output:
    """Replaces an output that is larger than a frame by an error. Front ends refuse such requests beforehand."""
    fact = f"the result has {size} bytes, and {MAX_FRAME} can be sent to a front end"
    error = f"{fact}; send a shorter prompt or ask for fewer dimensions"
    return Output(output.request_id, output.sample, [], finish_reason=FinishReason.ERROR, error=error)
