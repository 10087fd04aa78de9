"""StepScheduler: the interface of a scheduler to a core, and the code that both schedulers share.

`Scheduler` is for models that keep pages or states between steps, `EncoderScheduler` for models that keep nothing. The
methods that only `Scheduler` needs have a neutral default, so a core never asks which scheduler it has.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Generic, TypeVar

from slipstream.config.config import SchedulerConfig
from slipstream.contracts.messages import Output
from slipstream.contracts.step import StepPlan, StepResult
from slipstream.scheduler.adapters import Adapters
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.drafting import DraftPlanner
from slipstream.scheduler.query_registry import QueryRegistry
from slipstream.scheduler.waiting import PromptSources

R = TypeVar("R")  # the requests of one prompt


class StepScheduler(Generic[R]):
    cache: CacheManager | None = None  # pages and states of requests
    drafts: DraftPlanner | None = None

    def __init__(self, config: SchedulerConfig, adapters: Adapters[Any] | None, queue: Sized) -> None:
        """`queue`: the requests that wait."""
        self.config = config
        self.adapters = adapters
        self.max_num_tokens: int | None = None  # of a step that others wait for; None: the whole budget
        self.sources: PromptSources[R] = PromptSources(self.submit, queue)
        self._queries: QueryRegistry[Any] = QueryRegistry(config.max_kept)
        self._failures: list[Output] = []
        self._next_step = 0

    @property
    def num_running(self) -> int:
        raise NotImplementedError

    @property
    def num_waiting(self) -> int:
        raise NotImplementedError

    @property
    def num_live(self) -> int:
        """Number of request ids with a sample that has not ended."""
        raise NotImplementedError

    @property
    def num_preemptions(self) -> int:
        return 0

    @property
    def may_wait_for_prompts(self) -> bool:
        """Whether plans are the same however late prompts of one priority are submitted."""
        raise NotImplementedError

    def has_requests(self) -> bool:
        """Whether there is anything to plan, to commit or to report. Prompts of `sources` do not count."""
        raise NotImplementedError

    def serves(self, request_id: str) -> bool:
        """Whether a sample of this request has not ended."""
        raise NotImplementedError

    def keeps_query(self, request_id: str) -> bool:
        """Whether the device still stores the query of this request, which may have ended."""
        return self._queries.is_kept(request_id)

    def submit(self, requests: R) -> None:
        """Submit the requests of one prompt. Raises an error at once if they could never run."""
        raise NotImplementedError

    def abort(self, request_id: str, sample: int | None = None) -> Sequence[Any]:
        """End a request, or one sample of it, in any state. Returns the samples that had not ended yet."""
        raise NotImplementedError

    def limit_tokens(self, limit: int | None, *, readers_wait: bool) -> None:
        """For the next plan. `limit`: tokens of a step while tokens are read; `readers_wait`: of another model."""
        self.max_num_tokens = limit

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute before another result is committed."""
        raise NotImplementedError

    def commit(self, result: StepResult) -> list[Output]:
        """Process the result of the oldest plan in flight."""
        raise NotImplementedError

    def advance_grammars(self, *, wait: bool) -> list[Output]:
        """Outputs of grammars that threads have advanced since the last commit; none if they still run, unless `wait`
        is set."""
        return []

    def sit_out(self, step: int, requests: Sequence[Any]) -> None:
        """These requests draw nothing in a launched step: their masks were late."""

    def preempt_all(self) -> None:
        """Between two steps: release the rows and pages of all running requests."""

    def take_begun(self) -> list[str]:
        """Generation requests that the last plan admitted for the first time. Each id is returned once."""
        return []

    def take_freed_queries(self) -> tuple[int, ...]:
        """Stored queries that no request needs any more and that no plan has freed yet."""
        return self._queries.take_freed()

    def take_failures(self) -> list[Output]:
        """Outputs of requests that ended without a step of their own."""
        failures, self._failures = self._failures, []
        return failures

    def check(self) -> None:
        """Assert every invariant. For tests."""
        raise NotImplementedError
