"""RequestProcessors: the logits processors of one sample, and the true tokens that they see."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from slipstream.contracts.step import LogitsEdit, Processed
from slipstream.params.processors import RequestLogitsProcessor
from slipstream.scheduler.processors.token_edits import RowEdit


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
