"""Result classes of generation, with vLLM's names."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import struct
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar, cast, overload

import msgspec

from slipstream.contracts.messages import LOGPROB
from slipstream.params.lora import LoRARequest
from slipstream.text.tokenizer import Tokenizer

log = logging.getLogger("slipstream.front")


class Logprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None = None  # 1 is the most likely; None for a token of logprob_token_ids without a rank
    decoded_token: str | None = None


class RequestMetrics(msgspec.Struct):
    """Names of vLLM's RequestStateStats."""

    arrival_time: float  # seconds since the epoch
    queued_ts: float = 0.0  # monotonic seconds
    scheduled_ts: float = 0.0  # monotonic seconds; 0 where it is not known, as for `LLM`
    num_generation_tokens: int = 0
    first_token_ts: float = 0.0  # monotonic seconds
    last_token_ts: float = 0.0  # monotonic seconds
    first_token_latency: float = 0.0  # seconds from arrival to the first token


Struct = TypeVar("Struct", bound=type[msgspec.Struct])


def as_dataclass(*names: str) -> Callable[[Struct], Struct]:
    """Lets `dataclasses.asdict`, `fields` and `replace` work on a Struct, with these attributes as its fields."""

    def change(kind: Struct) -> Struct:
        made: Any = dataclasses.make_dataclass(kind.__name__, [(name, Any) for name in names])
        kind.__dataclass_fields__ = made.__dataclass_fields__  # type: ignore[attr-defined]
        return kind

    return change


@as_dataclass("index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason")
class CompletionOutput(msgspec.Struct):
    """One sample."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    # one dict per token: the sampled token first, then the most likely ones, then those of logprob_token_ids
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length, repetition, abort or error
    stop_reason: int | str | None = None  # the stop token or stop string found; None for an end-of-text token

    # fields of vLLM for what this engine does not have
    lora_request: ClassVar[None] = None
    routed_experts: ClassVar[None] = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class Increment(msgspec.Struct):
    """The new part of one sample since its last increment. The increments together are its whole output."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None
    finish_reason: str | None  # set in the last increment
    stop_reason: int | str | None


@dataclasses.dataclass(init=False, slots=True)
class RequestOutput:
    """All samples of one prompt. The arguments are vLLM's, in its order; those of a later version are ignored with a
    warning."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None  # by prompt token; None for the first
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None
    num_cached_tokens: int

    lora_request: LoRARequest | None

    # of vLLM; None but where a script sets them
    encoder_prompt: str | None
    encoder_prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        prompt_logprobs: Sequence[dict[int, Logprob] | None] | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestMetrics | None = None,
        lora_request: LoRARequest | None = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int = 0,
        *,
        kv_transfer_params: dict[str, Any] | None = None,
        **later: Any,
    ) -> None:
        if later:
            log.warning("RequestOutput has no %s; they are ignored", ", ".join(later))
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.num_cached_tokens = num_cached_tokens
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.kv_transfer_params = kv_transfer_params


# LogprobStore keeps logprobs as packed bytes; LogprobList reads as a list of dicts, each built on first access.
#
# Most requested logprobs are never read, and building Python objects for all of them would take longer than a step.

TextOf = Callable[[int], str | None]
BytesOf = Callable[[int], bytes]
Entry = TypeVar("Entry", bound="dict[int, Logprob] | None")

_ENTRY = struct.Struct("<dii")
assert _ENTRY.size == LOGPROB.itemsize
_BROKEN = "\ufffd"  # what decoding gives for a part of a character
_LONGEST = 4  # bytes of a character


class LogprobStore:
    """The logprobs of one sample or prompt so far, append-only."""

    __slots__ = ("packed", "size", "text_of", "bytes_of", "made", "_sum", "_num_summed")

    def __init__(self, num_each: int, text_of: TextOf, bytes_of: BytesOf = lambda token: b"") -> None:
        """`num_each`: LOGPROB entries per token, including that of the token itself. `bytes_of`: for tokens that are a
        part of a character."""
        self.size = num_each * LOGPROB.itemsize
        # LOGPROB entries by token. One growing array would be reallocated now and then, for all rows in the same step
        self.packed: list[bytes] = []
        self.text_of = text_of
        self.bytes_of = bytes_of
        self.made: dict[int, dict[int, Logprob]] = {}  # by token index, those that were read
        self._sum = 0.0
        self._num_summed = 0

    def __len__(self) -> int:
        return len(self.packed)

    def take(self, data: bytes) -> None:
        """Appends the entries of one or more tokens."""
        size = self.size
        if len(data) == size:
            self.packed.append(data)
        else:
            assert not len(data) % size, f"{len(data)} bytes came, a token has {size}"
            self.packed += [data[start : start + size] for start in range(0, len(data), size)]

    def entry(self, index: int) -> dict[int, Logprob] | None:
        """The logprobs of a token: its own, those of the most likely tokens, those of logprob_token_ids without a rank.

        None for index -1: the first token of a prompt.
        """
        if index < 0:
            return None
        entry = self.made.get(index)
        if entry is None:
            entry = self.made[index] = self.new_entry(index)
        return entry

    def new_entry(self, index: int) -> dict[int, Logprob]:
        """As `entry`, of a token that exists, and not kept."""
        entry: dict[int, Logprob] = {}
        text_of = self.text_of
        for logprob, token, rank in _ENTRY.iter_unpack(self.packed[index]):
            if token not in entry:
                text = text_of(token)
                if text is not None and text.endswith(_BROKEN):
                    text = self._completed(index, token)
                entry[token] = Logprob(logprob, rank or None, text)
        return entry

    def splits_character(self, index: int) -> bool:
        """Whether the text of some token of an entry depends on the tokens before it."""
        texts = (self.text_of(token) for _, token, _ in _ENTRY.iter_unpack(self.packed[index]))
        return any(text is not None and text.endswith(_BROKEN) for text in texts)

    def _completed(self, index: int, token: int) -> str:
        """The text of a token whose bytes end within a character: empty. The token that completes the character has
        all of it, also the bytes of the tokens before."""
        own = self.bytes_of(token)
        before = b""
        for previous in range(index - 1, max(index - _LONGEST, 0) - 1, -1):
            before = self.bytes_of(_ENTRY.unpack_from(self.packed[previous])[1]) + before
            if before and before[0] & 0xC0 != 0x80:
                break  # it begins with a character
        pending = getincrementaldecoder("utf-8")("replace")
        pending.decode(before)
        begun: bytes = pending.getstate()[0]
        try:
            return (begun + own).decode()
        except UnicodeDecodeError:
            return ""

    def cumulative(self) -> float:
        """The sum of the tokens' own logprobs, in the order of the tokens."""
        for entries in self.packed[self._num_summed :]:
            self._sum += _ENTRY.unpack_from(entries)[0]
        self._num_summed = len(self.packed)
        return self._sum


class LogprobList(Sequence[Entry]):
    """A view of a LogprobStore with the interface of a list of dicts, and of vLLM's FlatLogprobs. `+` gives a list; a
    slice shares the store."""

    __slots__ = ("_store", "_indices")

    def __new__(cls, store: LogprobStore | Iterator[Entry], indices: range | None = None) -> Any:
        """A plain list of entries without `indices`: `dataclasses.asdict` makes its copies of lists so."""
        return list(cast(Iterator[Entry], store)) if indices is None else super().__new__(cls)

    def __init__(self, store: LogprobStore, indices: range) -> None:
        self._store = store
        self._indices = indices

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return list  # for isinstance in scripts

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobList[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | LogprobList[Entry]:
        if isinstance(index, slice):
            return LogprobList(self._store, self._indices[index])
        return cast(Entry, self._store.entry(self._indices[index]))

    def __iter__(self) -> Iterator[Entry]:
        return cast(Iterator[Entry], map(self._store.entry, self._indices))

    def unkept(self) -> Iterator[Entry]:
        """The entries, for a reader that reads each once: the list keeps none of them."""
        store = self._store
        return (cast(Entry, None if index < 0 else store.new_entry(index)) for index in self._indices)

    def own(self) -> Iterator[float | None]:
        """The logprob of each token itself; None for the first token of a prompt."""
        packed = self._store.packed
        return (None if index < 0 else _ENTRY.unpack_from(packed[index])[0] for index in self._indices)

    # attributes of vLLM's FlatLogprobs: entries of all tokens, and where those of each token start and end

    @property
    def start_indices(self) -> list[int]:
        return [end - size for end, size in zip(self.end_indices, self._sizes, strict=True)]

    @property
    def end_indices(self) -> list[int]:
        return list(itertools.accumulate(self._sizes))

    @property
    def _sizes(self) -> list[int]:
        return [len(entry) for entry in self._made()]

    @property
    def token_ids(self) -> list[int]:
        return [token for entry in self._made() for token in entry]

    @property
    def logprobs(self) -> list[float]:
        return [each.logprob for each in self._entries()]

    @property
    def ranks(self) -> list[int | None]:
        return [each.rank for each in self._entries()]

    @property
    def decoded_tokens(self) -> list[str | None]:
        return [each.decoded_token for each in self._entries()]

    def _entries(self) -> Iterator[Logprob]:
        return (each for entry in self._made() for each in entry.values())

    def _made(self) -> Iterator[dict[int, Logprob]]:
        return (self._store.entry(index) or {} for index in self._indices)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | LogprobList):
            return len(self) == len(other) and all(mine == yours for mine, yours in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # like list

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other] if isinstance(other, list | LogprobList) else NotImplemented

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return repr(list(self))

    def __copy__(self) -> LogprobList[Entry]:
        return self[:]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the texts of these tokens instead of the tokenizer."""
        store, indices = self._store, self._indices
        start = max(0, min(indices, default=0))
        stop = 1 + max(indices, default=-1)
        packed = store.packed[start:stop]
        tokens = {token for own in packed for _, token, _ in _ENTRY.iter_unpack(own)}
        texts = {token: store.text_of(token) for token in tokens}
        own = range(indices.start - start, indices.stop - start, indices.step)
        split = [index for index in range(start, stop) if store.splits_character(index)]
        made = {index: store.entry(index) for index in split} | {
            index: entry for index, entry in store.made.items() if index in indices
        }
        made = {index - start: entry for index, entry in made.items()}
        return _restored, (store.size // LOGPROB.itemsize, texts, packed, made, own)


def read_once(entries: Sequence[Entry]) -> Iterator[Entry]:
    """The entries one after another. Those that a LogprobList makes are not kept."""
    return entries.unkept() if isinstance(entries, LogprobList) else iter(entries)


def own_logprobs(entries: Sequence[Entry]) -> Iterator[float | None]:
    """The logprob of each token itself; None for the first token of a prompt."""
    if isinstance(entries, LogprobList):
        return entries.own()
    return (None if entry is None else next(iter(entry.values())).logprob for entry in entries)


FlatLogprobs = LogprobList  # vLLM's name


def _restored(
    num_each: int,
    texts: dict[int, str | None],
    packed: list[bytes],
    made: dict[int, dict[int, Logprob]],
    indices: range,
) -> LogprobList[Any]:
    store = LogprobStore(num_each, texts.__getitem__)
    store.packed, store.made = packed, made
    return LogprobList(store, indices)


def new_store(num_each: int, tokenizer: Tokenizer | None) -> LogprobStore:
    """`tokenizer`: None if no texts are wanted."""
    if tokenizer is None:
        return LogprobStore(num_each, _no_text)
    return LogprobStore(num_each, tokenizer.text_of, tokenizer.bytes_of)


def _no_text(token: int) -> None:
    return None
