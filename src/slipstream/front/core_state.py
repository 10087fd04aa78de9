"""CoreState: what a front end knows about its core: its models, and whether it is loading, ready or lost."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slipstream.base.errors import InvalidAdapter, ModelNotFound
from slipstream.base.processes import check_process
from slipstream.checkpoint.locate import check_adapter_folder
from slipstream.front.served import ServedModel, choose
from slipstream.params.lora import LoRARequest
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


def wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


# QueueLoad: the requests and tokens of one front end, and the rate at which its queue empties.


class QueueLoad:
    """A prompt is queued until its first output arrives, and open until it is finished."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_queued = 0
        self.num_encoding = 0  # prompts that are being tokenised, before they are queued
        self.queued_tokens = 0
        self.queued_of: Counter[str] = Counter()  # queued prompts by model
        self.queued_by: Counter[str] = Counter()  # queued and encoding prompts by caller, without zeros
        self._rate = 0.0  # requests per second that leave the queue, a moving average
        self._since = time.monotonic()
        self._num_started = 0

    @property
    def num_not_started(self) -> int:
        """Prompts that are queued or being tokenised. The core's `num_waiting` counts samples without a row instead."""
        return self.num_queued + self.num_encoding

    @contextmanager
    def encoding(self, count: int, caller: str = "") -> Iterator[None]:
        """A context in which `count` prompts are being tokenised."""
        self.num_encoding += count
        self.queued_by[caller] += count
        try:
            yield
        finally:
            self.num_encoding -= count
            self._leave_queue(caller, count)

    def enter(self, model: str, num_tokens: int, caller: str = "") -> None:
        self.num_open += 1
        self.num_queued += 1
        self.queued_of[model] += 1
        self.queued_by[caller] += 1
        self.queued_tokens += num_tokens

    def start(self, model: str, num_tokens: int, caller: str = "") -> None:
        self.num_queued -= 1
        self.queued_of[model] -= 1
        self._leave_queue(caller, 1)
        self.queued_tokens -= num_tokens
        self._num_started += 1

    def _leave_queue(self, caller: str, count: int) -> None:
        self.queued_by[caller] -= count
        if not self.queued_by[caller]:
            del self.queued_by[caller]  # the number of callers has no bound

    def finish(self) -> None:
        self.num_open -= 1

    def seconds_to_drain(self) -> float:
        """An estimate of the time until all queued prompts have started; 1 second before there is a rate."""
        now = time.monotonic()
        if (passed := now - self._since) >= 1.0:
            recent = self._num_started / passed
            self._rate = recent if not self._rate else 0.5 * (self._rate + recent)
            self._since, self._num_started = now, 0
        return self.num_queued / self._rate if self._rate else 1.0


# AdapterNames: LoRA adapters that requests name as their model, those of the start and those loaded since.


class AdapterNames:
    """The adapters of one front end. Each is a `ServedModel` with the name of the adapter."""

    def __init__(self) -> None:
        self._served: dict[str, ServedModel] = {}
        self._known: set[str] = set()  # models whose adapters of the start are listed
        self._next_number = 1

    def of(self, models: Mapping[str, ServedModel]) -> dict[str, ServedModel]:
        """All adapters by name. `models`: the base models that are loaded."""
        for name, served in models.items():
            if name not in self._known:
                self._known.add(name)
                for lora in served.description.adapters:
                    self._add(lora.lora_name, lora.lora_path, served)
        return self._served

    def load(
        self, models: Mapping[str, ServedModel], name: str, path: str, *, base: str | None = None, replace: bool = False
    ) -> None:
        """Adds an adapter. Its settings are checked now, with the rank; its matrices when a request first uses it."""
        if name in models or (name in self.of(models) and not replace):
            raise InvalidAdapter(
                f"there is a model {name} already; unload it or choose another name", param="lora_name"
            )
        takers = {model: served for model, served in models.items() if served.description.takes_adapters}
        if base is not None and base not in takers:
            raise ModelNotFound(f"{base} takes no adapters; {', '.join(takers) or 'no model here'} does")
        if not takers:
            raise InvalidAdapter("no model here takes adapters; start the server with --enable-lora")
        if base is None and len(takers) > 1:
            fact = f"{', '.join(takers)} take adapters"
            raise InvalidAdapter(f"{fact}; name one as base_model_name", param="base_model_name")
        served = next(iter(takers.values())) if base is None else takers[base]
        LoRARequest(name, 1, path)  # raises for wrong texts
        try:
            check_adapter_folder(Path(path), served.description.max_lora_rank)
        except InvalidAdapter as error:
            error.param = "lora_path"
            raise
        self._add(name, path, served)

    def unload(self, models: Mapping[str, ServedModel], name: str) -> None:
        """Requests of this adapter that were sent continue."""
        if name not in self.of(models):
            raise ModelNotFound(f"there is no adapter {name!r}; there is {', '.join(self._served) or 'none'}")
        del self._served[name]

    def _add(self, name: str, path: str, served: ServedModel) -> None:
        # numbers are never used twice, so the engine reads a folder again that is loaded again
        self._served[name] = served.with_adapter(LoRARequest(name, self._next_number, path))
        self._next_number += 1
