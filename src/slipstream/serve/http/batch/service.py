"""BatchService: the store of files and batches for the routes of one front end, whose calls run in a thread."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from slipstream.serve.http.batch.store import REPAIR, BatchStore, is_damage
from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.settings import ServerSettings

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("slipstream.http")


class StoreUnavailable(HTTPException):
    """The database is locked by another process, is damaged, or cannot be read or written."""

    def __init__(self, store: BatchStore, error: Exception) -> None:
        if is_damage(error):
            fact, after = f"the batch store is damaged: {error}; {REPAIR}: {store.path.name} in the batch_dir", None
        else:
            fact, after = f"the batch store cannot be used: {error}; try again", 5
        super().__init__(503, fact, code="store_unavailable", retry_after=after)


class BatchService:
    def __init__(self, settings: ServerSettings) -> None:
        assert settings.batch_dir is not None
        self.store = BatchStore(settings.batch_dir, settings.max_store_bytes, max(1, len(settings.api_key)))
        self.changed = asyncio.Event()  # a batch was created or cancelled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipstream-batches")
        self._max_held = settings.max_bodies_bytes
        self.num_held = 0  # bytes of files that are being stored or sent

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a method of the store. Raises StoreUnavailable."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **kwargs))
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreUnavailable(self.store, error) from error

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Around the use of a file's content in memory. Raises if the contents together are over the limit; one
        above the limit is accepted while there is no other."""
        if self.num_held and self.num_held + num_bytes > self._max_held:
            fact = f"files with {self.num_held} bytes are being stored or sent, the limit is {self._max_held}"
            raise HTTPException(429, f"{fact}; try again soon", retry_after=1, code="files_busy")
        self.num_held += num_bytes
        try:
            yield
        finally:
            self.num_held -= num_bytes

    def close(self) -> None:
        self._thread.shutdown()
        self.store.close()
