"""EngineCore: receive, plan, launch, commit. The loop in which the host never makes the device wait."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from slipstream.config.config import EngineConfig
from slipstream.errors import EngineDead
from slipstream.messages import Abort, Output, Submit
from slipstream.request import Request
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.scheduler import Scheduler
from slipstream.step import StepPlan, StepResult


class Handle(Protocol):
    """A launched step. `wait` sleeps until its result is on the host."""

    def wait(self) -> StepResult: ...


class Executor(Protocol):
    """Runs plans, in order, without waiting for them."""

    def launch(self, plan: StepPlan) -> None: ...
    def finish(self) -> Handle: ...
    def close(self) -> None: ...


class EngineCore:
    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.config = config
        self.depth = config.scheduler.depth
        self.scheduler = Scheduler(config.scheduler, CacheManager(config.cache))
        self.executor = executor
        self.in_flight: deque[Handle] = deque()
        self.num_steps = 0
        self._num_submitted = 0
        self._failure: BaseException | None = None

    def submit(self, message: Submit) -> None:
        """Take a prompt in, or refuse it with an exception; nobody else notices."""
        self._check_alive()
        params = message.params
        assert -1 not in (params.logprobs, params.prompt_logprobs), "inputs settle what the whole vocabulary is"
        limit = self.config.scheduler.max_model_len
        length = len(message.prompt_token_ids)
        max_length = limit if params.max_tokens is None else min(limit, length + params.max_tokens)
        number = self._num_submitted
        self._num_submitted += 1
        seed = _mix(self.config.scheduler.seed, number) if params.seed is None else params.seed & (2**64 - 1)
        end_ids = () if params.ignore_eos else self.config.model.info.eos_token_ids
        bad_words = tuple(map(tuple, message.bad_words))
        self.scheduler.submit(
            [
                Request(
                    message.request_id,
                    message.prompt_token_ids,
                    params,
                    sample=sample,
                    priority=message.priority,
                    cache_salt=message.cache_salt,
                    stop_ids=(*end_ids, *params.stop_ids),
                    bad_words=bad_words,
                    max_length=max_length,
                    seed=seed,
                )
                for sample in range(params.n)
            ]
        )

    def abort(self, message: Abort) -> None:
        self.scheduler.abort(message.request_id, message.sample)

    def has_work(self) -> bool:
        return bool(self.in_flight) or self.scheduler.has_work()

    def step(self) -> list[Output]:
        """Launch a step if there is one, and commit the oldest once enough are in flight."""
        self._check_alive()
        try:
            plan = self.scheduler.plan()
            if plan is not None:
                self.executor.launch(plan)
                self.in_flight.append(self.executor.finish())
                self.num_steps += 1
            if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
                return self.scheduler.commit(self.in_flight.popleft().wait())
            return []
        except BaseException as error:
            self._failure = error  # whatever it was, the halves may disagree now about what was launched
            if not isinstance(error, Exception):
                raise
            raise EngineDead(f"the engine failed in step {self.num_steps}: {error}; start a new one") from error

    def close(self) -> None:
        self.in_flight.clear()
        self.executor.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            cause = str(self._failure) or type(self._failure).__name__
            raise EngineDead(f"the engine has failed before: {cause}; start a new one") from self._failure


def _mix(seed: int, number: int) -> int:
    """A 64-bit seed for a request that brought none: the engine's seed and the request's place in line."""
    x = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)
