"""BatchService: the store of files and batches for the routes of one front end, whose calls run in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from slipstream.serve.http.batch.store import BatchStore
from slipstream.serve.http.settings import ServerSettings

P = ParamSpec("P")
T = TypeVar("T")


class BatchService:
    def __init__(self, settings: ServerSettings) -> None:
        assert settings.batch_dir is not None
        self.store = BatchStore(settings.batch_dir, settings.max_store_bytes)
        self.changed = asyncio.Event()  # a batch was created or cancelled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipstream-batches")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a method of the store."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **kwargs))

    def close(self) -> None:
        self._thread.shutdown()
        self.store.close()
