"""A progress bar for a terminal: finished requests and tokens per second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, what: str, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields a function to call for each finished request with its number of tokens. No output without a terminal."""
    if not shown or total == 0 or not sys.stderr.isatty():
        yield lambda num_tokens: None
        return
    from rich.console import Console  # imported for interactive terminals only
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), rate)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, rate="")
        start, total_tokens = time.monotonic(), 0

        def advance(num_tokens: int) -> None:
            nonlocal total_tokens
            total_tokens += num_tokens
            bar.update(task, advance=1, rate=f"{total_tokens / (time.monotonic() - start):.0f} tok/s")

        yield advance
