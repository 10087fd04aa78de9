"""RequestProcessors: the logits processors of one sample, and the true tokens that they see."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from slipstream.base.errors import InvalidOption
from slipstream.config.buffer_size import MAX_BIASED_IDS, mask_words
from slipstream.config.config import EngineConfig
from slipstream.contracts.step import LogitsEdit, Processed
from slipstream.params.processors import AdapterLogitsProcessor, LogitsProcessor, RequestLogitsProcessor

if TYPE_CHECKING:
    import torch


class RequestProcessors:
    """The lists of tokens belong to this request alone. They are extended by the tokens that became known, never
    copied, so a step costs the same after any number of tokens."""

    __slots__ = (
        "prompt_ids", "output_ids", "error", "by_tokens", "by_logits", "scaled", "batches", "is_slow", "job",
        "_callers",
    )  # fmt: skip

    def __init__(self, prompt: Sequence[int], callers: set[int] | None = None) -> None:
        """`callers`: has the threads in which a processor runs, while it runs."""
        self._callers = set() if callers is None else callers
        self.prompt_ids = list(prompt)
        self.output_ids: list[int] = []
        self.error = ""  # of the first processor that failed
        self.by_tokens: list[tuple[str, Callable[[], Any]]] = []  # name, and the callable with its lists
        self.by_logits: list[tuple[str, Callable[[Any], Any]]] = []
        self.scaled: list[tuple[str, Callable[[Any], Any]]] = []  # argmax-invariant: after the temperature
        self.batches: dict[int, bool] = {}  # batched processors of the engine by number: is it argmax-invariant?
        self.is_slow = False  # those that see tokens take longer than a step: they run ahead, in the background
        self.job: Future[tuple[RowEdit, float]] | None = None  # which runs them for the present tokens

    def __bool__(self) -> bool:
        return bool(self.by_tokens or self.by_logits or self.scaled or self.batches)

    @property
    def processed(self) -> Processed:
        """The processing that the device must prepare for."""
        scaled = self.scaled or any(self.batches.values())
        raw = self.by_logits or not all(self.batches.values())
        return (
            (Processed.TOKENS if self.by_tokens else Processed.NOTHING)
            | (Processed.LOGITS if raw else Processed.NOTHING)
            | (Processed.SCALED if scaled else Processed.NOTHING)
        )

    def add(self, name: str, call: RequestLogitsProcessor, *, needs: str, is_scaled: bool) -> None:
        prompt, output, callers = self.prompt_ids, self.output_ids, self._callers
        takes_prompt = _num_arguments(call) > (1 if needs == "tokens" else 2)
        lists = (prompt, output) if takes_prompt else (output,)

        def run(*logits: Any) -> object:
            callers.add(thread := threading.get_ident())
            try:
                return call(*lists, *logits)
            finally:
                callers.discard(thread)

        if needs == "tokens":
            self.by_tokens.append((name, run))
        else:
            (self.scaled if is_scaled else self.by_logits).append((name, run))

    def catch_up(self, tokens: list[int]) -> None:
        """Take the tokens that the request has got since; `tokens`: all of its tokens."""
        self.output_ids += tokens[len(self.prompt_ids) + len(self.output_ids) :]

    def fail(self, name: str, error: Exception) -> None:
        if not self.error:
            self.error = (
                f"the logits processor {name} of this request failed at output token {len(self.output_ids)}: "
                f"{type(error).__name__}: {error}"
            )

    def token_edit(self, vocab_size: int) -> RowEdit:
        """The edit that processors make from the present tokens. After an error no token is allowed."""
        edit = RowEdit()
        for name, call in self.by_tokens:
            try:
                edit.add(call(), vocab_size)
            except Exception as error:
                self.fail(name, error)
                edit.forbid_all(vocab_size)
                break
        return edit

    def timed_edit(self, vocab_size: int) -> tuple[RowEdit, float]:
        """The same, and the seconds that it took."""
        start = time.perf_counter()
        return self.token_edit(vocab_size), time.perf_counter() - start

    def logits_edits(self, row: int) -> list[LogitsEdit]:
        edits = []
        for calls, is_scaled in ((self.by_logits, False), (self.scaled, True)):
            for name, call in calls:
                edits.append(LogitsEdit((row,), call, self._reporter(name), is_scaled=is_scaled))
        return edits

    def _reporter(self, name: str) -> Callable[[Exception], None]:
        return lambda error: self.fail(name, error)


def _num_arguments(call: Callable[..., Any]) -> int:
    """Positional arguments without a default."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(call).parameters.values()
    return sum(1 for each in parameters if each.kind in positional and each.default is inspect.Parameter.empty)


# Finds the classes of an engine's logits processors and makes one object of each.

ENTRY_POINTS = "slipstream.logits_processors"
"""Group of the entry points of installed packages. Their classes are part of every engine."""


def find_classes(given: Sequence[object]) -> tuple[type[LogitsProcessor], ...]:
    """Classes of the option logits_processors, which has classes and names like package.module:Class, after those of
    installed packages."""
    found: list[object] = []
    for entry in installed():
        try:
            found.append(entry.load())
        except Exception as error:
            raise InvalidOption(
                f"the entry point {entry.name} of {ENTRY_POINTS} cannot be loaded: {_reason(error)}; repair or remove "
                "its package"
            ) from error
    found += [_load(each) if isinstance(each, str) else each for each in given]
    return tuple(dict.fromkeys(each for each in found if _check(each)))


@functools.cache
def installed() -> tuple[importlib.metadata.EntryPoint, ...]:
    """Entry points of installed packages. Reading all packages takes longer than the rest of a small engine's start."""
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINTS))


def make_processors(
    classes: Sequence[type[LogitsProcessor]], config: EngineConfig, device: torch.device, *, is_pin_memory: bool
) -> list[LogitsProcessor]:
    made = []
    for each in classes:
        try:
            made.append(each(config, device, is_pin_memory))
        except Exception as error:
            raise InvalidOption(
                f"the logits processor {each.__name__} cannot be made: {_reason(error)}; repair it or remove it from "
                "logits_processors"
            ) from error
    return made


def _load(name: str) -> object:
    module, _, qualified = name.partition(":")
    if not module or not qualified:
        raise InvalidOption(f"logits_processors has {name!r}; give a class, or its name as package.module:Class")
    try:
        found: object = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except Exception as error:  # the module is code of the user
        raise InvalidOption(f"logits_processors has {name!r}, which cannot be imported: {_reason(error)}") from error
    return found


def _check(found: object) -> TypeGuard[type[LogitsProcessor]]:
    """Raises if it is no class of a logits processor with all methods."""
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise InvalidOption(
            f"logits_processors has {found!r}; give classes that inherit slipstream.LogitsProcessor or "
            "slipstream.AdapterLogitsProcessor, or their names as package.module:Class"
        )
    base = AdapterLogitsProcessor if issubclass(found, AdapterLogitsProcessor) else LogitsProcessor
    needed = ["is_argmax_invariant", "update_state", "apply"]
    if issubclass(found, AdapterLogitsProcessor):
        if found.needs not in ("tokens", "logits"):
            raise InvalidOption(f'{found.__name__}.needs is {found.needs!r}; give "tokens" or "logits"')
        needed = ["new_req_logits_processor", *(["is_argmax_invariant"] if found.needs == "logits" else [])]
    for name in needed:
        if getattr(found, name) is getattr(base, name):
            raise InvalidOption(f"the logits processor {found.__name__} has no method {name}; define it")
    return True


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# RowEdit: what the processors that see tokens return for one row, as a mask and a sparse bias for the device.

Words = NDArray[np.uint32]
MAX_BIAS = 1e30  # sums with logits stay within float32


class RowEdit:
    __slots__ = ("mask", "bias")

    def __init__(self) -> None:
        self.mask: Words | None = None  # [words] bit t % 32 of word t // 32 is set if token t is allowed; None: all are
        self.bias: dict[int, float] = {}  # added to the logits of these tokens

    def add(self, edit: object, vocab_size: int) -> None:
        """Add the result of one processor. Several masks allow what each of them allows; biases are summed."""
        if edit is None:
            return
        if isinstance(edit, Mapping):
            self._add_bias(edit, vocab_size)
        elif isinstance(edit, Iterable) and not isinstance(edit, str | bytes):
            mask = allow(edit, vocab_size)
            self.mask = mask if self.mask is None else self.mask & mask
        else:
            raise TypeError(
                f"it returned {type(edit).__name__}; a processor that sees tokens returns allowed token ids, a mapping "
                "of token ids to numbers, or None"
            )

    def forbid_all(self, vocab_size: int) -> None:
        self.mask = np.zeros(mask_words(vocab_size), np.uint32)
        self.bias = {}

    def _add_bias(self, edit: Mapping[Any, Any], vocab_size: int) -> None:
        for token, value in edit.items():
            token, value = token.__index__(), float(value)
            if not 0 <= token < vocab_size:
                raise ValueError(f"it returned token id {token}; there are 0 to {vocab_size - 1}")
            if not (value == -math.inf or abs(value) <= MAX_BIAS):
                raise ValueError(f"it returned {value} for token {token}; give at most {MAX_BIAS:g}, or -inf")
            self.bias[token] = self.bias.get(token, 0.0) + value
        if len(self.bias) > MAX_BIASED_IDS:
            raise ValueError(
                f"it returned a bias of {len(self.bias)} tokens, the limit is {MAX_BIASED_IDS}; return allowed ids, or "
                'set needs = "logits"'
            )


def allow(ids: Iterable[Any], vocab_size: int) -> Words:
    """The mask of these tokens."""
    if isinstance(ids, range):
        ids = np.arange(ids.start, ids.stop, ids.step)
    found = np.asarray(ids if isinstance(ids, np.ndarray | list | tuple) else list(ids))
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"it returned allowed ids of type {found.dtype}; give whole numbers")
    if found.size and (found.min() < 0 or found.max() >= vocab_size):
        bad = int(found.min() if found.min() < 0 else found.max())
        raise ValueError(f"it returned token id {bad}; there are 0 to {vocab_size - 1}")
    allowed = np.zeros(mask_words(vocab_size) * 32, np.bool_)
    allowed[found.astype(np.int64, copy=False)] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)
