"""CoreState: what a front end knows about its core: its models, and whether it is loading, ready or lost."""

from __future__ import annotations

import asyncio
import os

from slipstream.base.errors import EngineClosed
from slipstream.frontend.adapter_names import AdapterNames
from slipstream.frontend.served import ServedModel, choose
from slipstream.transport.frames import Loading, ModelDescriptions, Pulse, Ready, start_error


class CoreState:
    def __init__(self) -> None:
        self._pid = os.getpid()
        self.models: dict[str, ServedModel] = {}  # by name; the first is the default
        self.adapter_names = AdapterNames()
        self.pulse = Pulse()
        self.core_pid: int | None = None  # of a core in another process
        self.stage = "waiting for the engine core"  # of the start, for messages
        self.failure: BaseException | None = None
        self._ready = False
        self._opening: asyncio.Task[None] | None = None  # loads tokenizers
        self._state_waiters: list[asyncio.Future[None]] = []  # for the core to be ready or lost

    @property
    def is_ready(self) -> bool:
        return self._ready and self._opening is None and self.failure is None

    async def until_ready(self) -> None:
        """Returns when the core takes requests; raises if it is lost. An error of the model or of an option has the
        type and text as in a process of its own."""
        while not self.is_ready:
            if not self._ready and self.failure is not None:
                raise start_error(self.failure)
            self.check()
            self._state_waiters.append(waiter := asyncio.get_running_loop().create_future())
            await waiter
        self.check()

    async def until_lost(self) -> BaseException:
        """Returns the cause when the core is lost."""
        while self.failure is None:
            self._state_waiters.append(waiter := asyncio.get_running_loop().create_future())
            await waiter
        return self.failure

    def check(self) -> None:
        """Raises if the core is lost, or this process is a fork of the core's front end."""
        check_process(self._pid)
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """The core is lost. The first cause is kept."""
        if self.failure is None:
            self.failure = error
        wake(self._state_waiters)

    def core_pids(self) -> dict[str, int]:
        """Process ids of cores in other processes, by name: core, or core_0, core_1 … of replicas."""
        if self.pulse.replicas:
            return {f"core_{each.replica}": each.pid for each in self.pulse.replicas if each.pid and each.is_ready}
        return {} if self.core_pid is None else {"core": self.core_pid}

    def model(self, name: str | None = None, *tasks: str) -> ServedModel:
        """The model of that name, or the best one for the first of the tasks that any model can do."""
        return choose(self.models, name, *tasks, adapters=self.adapter_names.of(self.models))

    def load_adapter(self, name: str, path: str, *, base: str | None = None, replace: bool = False) -> None:
        """Requests to this front end may name the adapter as their model from now on."""
        self.adapter_names.load(self.models, name, path, base=base, replace=replace)

    def unload_adapter(self, name: str) -> None:
        self.adapter_names.unload(self.models, name)

    def note(self, message: Pulse | Loading | ModelDescriptions | Ready) -> None:
        """Handles a message of the core about itself."""
        if isinstance(message, Pulse):
            self.pulse = message
        elif isinstance(message, Loading):
            self.stage = message.stage
        elif isinstance(message, ModelDescriptions):
            self.core_pid = message.pid
            self._opening = asyncio.ensure_future(self._open(message))
        else:
            self._ready = True
            self._wake_if_ready()

    async def _open(self, opening: ModelDescriptions) -> None:
        """Loads tokenizers in a thread, while the core loads weights."""
        loop = asyncio.get_running_loop()
        try:
            for description in opening.models:
                self.models[description.name] = await loop.run_in_executor(None, ServedModel.load, description)
        except Exception as error:
            self.fail(error)
        self._opening = None
        self._wake_if_ready()

    def stop_opening(self) -> None:
        if self._opening is not None:
            self._opening.cancel()

    def _wake_if_ready(self) -> None:
        if self.is_ready:
            wake(self._state_waiters)


def check_process(pid: int) -> None:
    """Raises in a fork of the process that made an engine: a call would wait forever for threads that do not exist."""
    if pid != os.getpid():
        raise EngineClosed(
            f"process {pid} made this engine, and this is a fork of it, without its threads; make a new engine here"
        )


def wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()
