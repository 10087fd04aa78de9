"""Turns the prompts of one call into messages for the core: `GenerationPrompts`, and what pooling shares with it.

A call checks every prompt before the first one runs. Texts are tokenised in parts, each while the previous part is in
use, so the first step does not wait for the last prompt.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any, Generic, TypeVar

import numpy as np

from slipstream.base.errors import InvalidParams, InvalidPrompt, UserError
from slipstream.base.host import num_cpus
from slipstream.front.inputs import InputProcessor, PreparedPrompt, Prompt
from slipstream.params.lora import LoRARequest
from slipstream.params.sampling import SamplingParams
from slipstream.text.guarded import plain

_CHARS_PER_TOKEN = 4  # roughly
_MAX_PART = 2**19  # characters tokenised at a time: a tokenizer allocates much memory per token
_INTEGER = (int, np.integer)

Part = TypeVar("Part")
T = TypeVar("T")


def as_batch(prompts: Any) -> Sequence[Any]:
    """Returns a list of prompts, where one prompt or a list is given. A list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping | array):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim < 2 else list(prompts)
    if not isinstance(prompts, Sequence):
        raise InvalidPrompt(f"prompts is {type(prompts).__name__}; give a text, token ids, or a list of prompts")
    if prompts and isinstance(prompts[0], _INTEGER) and all(isinstance(item, _INTEGER) for item in prompts):
        return [prompts]
    return prompts


def per_prompt(name: str, value: object, count: int) -> Sequence[Any]:
    """Returns one value per prompt, where one value for all prompts or a list is given."""
    if isinstance(value, list | tuple):
        if len(value) != count:
            raise InvalidParams(f"there are {count} prompts and {len(value)} {name}; give one for all or one each")
        return value
    return [value] * count


class Lookahead(Generic[Part, T]):
    """Iterates over a list that is computed part by part. A thread computes the next part while the current is used.

    This helps functions that release the GIL, such as tokenising. With `threaded=False`, or with a single part, no
    thread starts: parts are computed when they are needed.
    """

    def __init__(self, make: Callable[[Part], list[T]], parts: Iterable[Part], *, threaded: bool = True) -> None:
        self._make = make
        self._threaded = threaded
        self._parts = deque(parts)
        self._made: deque[T] = deque()
        self._next: Future[list[T]] | None = None
        self._thread: ThreadPoolExecutor | None = None  # its thread ends when the executor is dropped

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._made:
            self._advance()
        return self._made.popleft()

    def finish(self) -> None:
        """Computes what is left."""
        while self._parts or self._next is not None:
            self._advance()

    def is_ready(self) -> bool:
        """Whether `next` returns, or raises StopIteration, without waiting."""
        return bool(self._made) or (not self._parts if self._next is None else self._next.done())

    def _advance(self) -> None:
        pending, self._next = self._next, None
        try:
            if pending is not None:
                made = pending.result()
            elif self._parts:
                made = self._make(self._parts.popleft())
            else:
                raise StopIteration
        except BaseException:
            self._parts.clear()  # nothing follows a part that failed
            self._thread = None
            raise
        finally:
            del pending  # breaks the reference cycle of an exception and this frame
        if self._parts and self._threaded:
            self._thread = self._thread or ThreadPoolExecutor(1, "slipstream-texts")
            self._next = self._thread.submit(self._make, self._parts.popleft())
        else:
            self._thread = None
        self._made.extend(made)


class GenerationPrompts:
    """The prompts of one generation call. Iterating gives their messages in the order of the prompts.

    The first part of the texts has about as many tokens as a step, and each further part twice as many.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        new_id: Callable[[], str],
        *,
        priorities: Sequence[int | None] | None = None,
        salts: Sequence[str | None] | None = None,
        adapters: Sequence[LoRARequest | None] | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        self.prepared: list[PreparedPrompt] = []  # without token ids where the prompt is a text
        each = zip(
            prompts, params, priorities or repeat(None), salts or repeat(None), adapters or repeat(None), strict=False
        )
        try:
            for prompt, own, priority, salt, adapter in each:
                message = inputs.prepare_text(
                    new_id(), prompt, own, priority=priority, cache_salt=salt, lora_request=adapter
                )
                self.prepared.append(message)
        except UserError as error:
            raise error.of_prompt(len(self.prepared), len(prompts)) from None
        self.has_one_priority = len({message.priority for message, _ in self.prepared}) < 2
        # whether tokenising cannot raise an error for any of the texts
        self.is_sure = all(
            message.prompt_token_ids or inputs.surely_fits(message, text or "") for message, text in self.prepared
        )
        make = partial(_complete, inputs, self.prepared, add_special_tokens)  # no reference to self: avoids a cycle
        self._made = Lookahead(make, _parts(self.prepared, _CHARS_PER_TOKEN * inputs.description.max_batch_tokens))

    def __iter__(self) -> Iterator[PreparedPrompt]:
        return self._made

    def finish(self) -> None:
        """Tokenises all texts that are left."""
        self._made.finish()

    def is_ready(self) -> bool:
        """Whether the next message is available without waiting."""
        return self._made.is_ready()


def _complete(
    inputs: InputProcessor, prepared: Sequence[PreparedPrompt], special: bool, part: slice
) -> list[PreparedPrompt]:
    """Tokenises the texts of a part of the prepared prompts, in one call of the tokenizer."""
    to_tokenise: list[str | None] = []  # None if the prompt has token ids
    made: list[PreparedPrompt] = []
    try:
        for message, text in prepared[part]:
            to_tokenise.append(None if message.prompt_token_ids else inputs.to_tokenise(message, text or ""))
    except UserError as error:
        raise error.of_prompt(part.start + len(to_tokenise), len(prepared)) from None
    texts = [text for text in to_tokenise if text is not None]
    try:
        encoded = inputs.encode(texts, special) if texts else []
    except InvalidPrompt:
        encoded = []  # encoded one by one below, which shows the text that fails
    each = iter(encoded)
    try:
        for (message, text), read in zip(prepared[part], to_tokenise, strict=True):
            if read is not None:
                message = inputs.complete(message, next(each) if encoded else inputs.encode([read], special)[0])
            made.append((message, text and plain(text)))
    except UserError as error:
        raise error.of_prompt(part.start + len(made), len(prepared)) from None
    return made


def _parts(prepared: Sequence[PreparedPrompt], size: int) -> Iterator[slice]:
    """Slices of the prepared prompts: the first has `size` characters to tokenise, each further one twice as many."""
    start = taken = 0
    size = min(size or _MAX_PART, _MAX_PART)
    for index, (message, text) in enumerate(prepared):
        if taken >= size:
            yield slice(start, index)
            start, taken, size = index, 0, min(2 * size, _MAX_PART)
        if not message.prompt_token_ids:
            taken += len(text or "")
    yield slice(start, len(prepared))


# Long work that must not block the event loop: native code such as tokenisation runs in a few threads, with bounded
# memory, Python code in pieces between turns of the loop (threads would keep the loop waiting for the interpreter
# lock).
#
# glibc keeps freed memory in one arena per thread, and a tokenizer allocates about a hundred bytes per character in
# small blocks. Without `trim_heap` and `bound_heap`, a front end that has read a few large texts would hold gigabytes.

LONG = (
    8192  # characters or token ids from which a function runs in a thread; shorter calls take less time than the switch
)
PROMPT_COST = 128  # characters that take as long to tokenise as the fixed cost of a prompt
TURN = 2**15  # bytes that an answer grows by in one turn of the event loop: a few milliseconds of logprobs
_TRIM_SIZE = 2**18  # characters of one call from which the heap is trimmed after it

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # parameters of mallopt
_MMAP_SIZE = 2**20  # bytes: larger blocks are mapped on their own, and unmapped when freed
_MAX_ARENAS = 4


class TokenizerThreads:
    """A thread pool that calls functions in the order of arrival."""

    def __init__(self, threads: int | None = None) -> None:
        count = min(num_cpus(), 8) if threads is None else threads
        self._pool = ThreadPoolExecutor(count, "slipstream-long-texts")
        self._lock = threading.Lock()
        self.size = 0  # characters of calls that wait or run

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """Returns the result of `function` on `size` characters. From `LONG` characters on, a thread calls it."""
        if size < LONG:
            return function()
        with self._lock:
            self.size += size
        future = self._pool.submit(_run, size, function)

        def release(done: Future[Any]) -> None:  # also runs where the call was cancelled before it started
            with self._lock:
                self.size -= size

        future.add_done_callback(release)
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # breaks the reference cycle of an exception and this frame


def _run(size: int, function: Callable[[], T]) -> T:
    try:
        return function()
    finally:
        if size >= _TRIM_SIZE:
            trim_heap()


TOKENIZER_THREADS = TokenizerThreads()
"""The pool of this process."""
off_loop = TOKENIZER_THREADS.run


class AnswerPieces:
    """Builds answers in pieces. All callers together build at most `TURN` bytes per turn of the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def join(self, pieces: Iterable[bytes]) -> list[bytes]:
        """All bytes of `pieces`, in parts of about `TURN` bytes. What is small is built at once. An empty piece stands
        for work of a whole turn."""
        parts: list[bytes] = []
        part, size = list[bytes](), 0
        for piece in pieces:
            part.append(piece)
            size += len(piece) or TURN
            if size >= TURN:
                parts.append(b"".join(part))
                part, size = [], 0
                async with self._lock:
                    await asyncio.sleep(0)
        return [*parts, b"".join(part)] if part else parts


def size_of(prompt: object) -> int:
    """The number of characters or token ids of a prompt of any form."""
    if isinstance(prompt, Mapping):
        return sum(map(_length, prompt.values()))
    if isinstance(prompt, tuple) and any(isinstance(one, str) for one in prompt[:2]):
        return sum(map(_length, prompt))  # a pair of texts
    return _length(prompt)


def _length(part: object) -> int:
    if isinstance(part, np.ndarray):
        return part.size if part.ndim else 0
    return len(part) if isinstance(part, Sequence | array) else 0


def bound_heap() -> None:
    """Limits glibc's arenas and the size of blocks in them. Call before the process starts threads."""
    if (mallopt := _libc_function("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_SIZE)
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)


def trim_heap() -> None:
    """Returns free memory to the system. Takes milliseconds."""
    if (malloc_trim := _libc_function("malloc_trim")) is not None:
        malloc_trim(0)


def _libc_function(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
        return found
    except (AttributeError, OSError, TypeError):  # a C library other than glibc
        return None
