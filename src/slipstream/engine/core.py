"""EngineCore: the loop submit, plan, launch, commit, in which the host never makes the device wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from slipstream.base.errors import EngineDead, SlipstreamError
from slipstream.config.config import EngineConfig
from slipstream.contracts.messages import Abort, Output, PromptSource, Submit
from slipstream.contracts.request import Request
from slipstream.contracts.step import Background, DrawEdits, Executor, Handle, Peers, StepPlan, TierCopier, WeightUpdate
from slipstream.engine.pacing import Pacer
from slipstream.handoff.client import Handoff
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.record.device_timing import DeviceTimer
from slipstream.record.recorder import Recorder, save_failure
from slipstream.record.step_log import LaneLog
from slipstream.scheduler.adapters import Adapters
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.encoder_scheduler import EncoderRequest, EncoderScheduler
from slipstream.scheduler.grammar.constraints import Constraints
from slipstream.scheduler.scheduler import Scheduler
from slipstream.scheduler.step_scheduler import StepScheduler

PROMPTS_PER_STEP = 8  # of a source, taken with each step, so that rows that finish together can be filled at once


class EngineCore:
    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        constraints: Constraints | None = None,
        adapters: Adapters[Any] | None = None,
        recorder: Recorder | None = None,
        weights: WeightUpdate | None = None,
        peers: Peers | None = None,
        tier: TierCopier | None = None,
    ) -> None:
        """`constraints`: required for structured output and logits processors; `adapters`: for LoRA adapters;
        `recorder`: plans pass through it; `weights`: exchanges the weights of the model; `peers`: the executor, if
        other processes take part in its steps; `tier`: copies pages, if the cache has a second tier."""
        self.config = config
        self.constraints = constraints
        self.adapters = adapters
        self._background: list[Background] = [each for each in (constraints, adapters) if each is not None]
        self.depth = config.scheduler.depth
        self.scheduler: StepScheduler[Any]
        self._make_requests: Callable[[Submit, EngineConfig, int], object] = requests_of
        if config.scheduler.is_encoder:
            self.scheduler = EncoderScheduler(config.scheduler, adapters)
            self._make_requests = encoder_request
        else:
            drafts = config.scheduler.drafts
            cache = CacheManager(config.cache, 0 if drafts is None else drafts.num_drafts)
            self.scheduler = Scheduler(config.scheduler, cache, constraints, adapters, config.images)
        self.executor = executor
        self.recorder = recorder
        self.weights = weights
        self.peers = peers
        self.tier = tier
        self.memory: dict[str, int] = {}  # planned bytes by part, for statistics
        self.handoff: Handoff | None = None  # set if pages are exchanged with other engines
        self.in_flight: deque[Handle] = deque()
        self._headless: StepPlan | None = None  # its forward is launched; its head waits for masks
        self.timer = DeviceTimer()
        self.pace = Pacer(config.scheduler.max_itl)
        self.readers_wait = False  # whether tokens of other models are read, whose steps wait for those of this one
        if self.scheduler.drafts is not None and self.scheduler.drafts.length is not None:
            self.pace.on_decode = self.scheduler.drafts.length.measure
        self._causes: deque[str] = deque()  # causes of the device's idle gaps before the steps in flight
        self._untimed: deque[tuple[Handle, str]] = deque()  # committed without waiting: may still run on the device
        self.step_log: LaneLog | None = None  # set while times of steps are read
        self.num_steps = 0
        self._num_submitted = 0
        self._failure: BaseException | None = None

    @property
    def _launcher(self) -> Executor:
        """The object that launches plans."""
        return self.executor if self.recorder is None else self.recorder

    def submit(self, *messages: Submit) -> None:
        """Submit prompts, or raise an error and submit none of them."""
        self._check_alive()
        number = self._num_submitted
        for index, message in enumerate(messages):
            try:
                self.scheduler.submit(self._requests(message))
            except Exception as error:
                for taken in reversed(messages[:index]):  # documents before their query
                    self.abort(Abort(taken.request_id))
                self._num_submitted = number
                # pooling prompts are in an order that the sender chose, so their index means nothing to the user
                if isinstance(error, SlipstreamError) and isinstance(message.params, SamplingParams):
                    named = error.of_prompt(index, len(messages))
                    if named is not error:
                        raise named from None
                raise

    def _requests(self, message: Submit) -> object:
        self._num_submitted += 1
        return self._make_requests(message, self.config, self._num_submitted - 1)

    def feed(self, source: PromptSource) -> Callable[[], None]:
        """Takes the prompts of a call as steps have room for them, so that the first step does not wait for the last
        prompt. The steps are the same as if all were submitted first. Returns a function that ends it."""
        self._check_alive()
        scheduler = self.scheduler
        is_lazy = source.has_one_priority and scheduler.may_wait_for_prompts
        close = scheduler.sources.add(_Requests(source, self._requests, self.timer), is_lazy=is_lazy)

        def stop() -> None:
            close()
            self.mark_idle_if_no_request()

        return stop

    def _take_prompts(self) -> bool:
        """Before a step: submits the prompts that the next steps should have. Returns False if one was refused."""
        sources, num_new = self.scheduler.sources, 0
        num_refused = sources.num_refused
        while sources and (num := sources.take(self._room(num_new))):
            num_new += num
        return sources.num_refused == num_refused

    def _room(self, num_new: int) -> int:
        """How many prompts to take now; `num_new` were taken since the last step."""
        scheduler, limits = self.scheduler, self.config.scheduler
        if not scheduler.sources.is_lazy:
            return limits.max_waiting
        if not scheduler.sources.is_ready():
            # wait for a prompt only if there is nothing to compute
            return not (self.has_launched or scheduler.has_requests())
        if not self.has_launched:
            return not scheduler.num_waiting  # the device is idle: one prompt, then a step
        if scheduler.num_waiting >= 2 * limits.max_num_seqs:
            return 0  # enough for the next steps
        return PROMPTS_PER_STEP - num_new if num_new < PROMPTS_PER_STEP else self.runs_far_ahead()

    def abort(self, message: Abort) -> int:
        """Returns how many samples this ended. Others may have ended before."""
        ended = self.scheduler.abort(message.request_id, message.sample)
        self.mark_idle_if_no_request()
        self._free_queries_if_idle()
        return len(ended)

    def mark_idle_if_no_request(self) -> None:
        """If no caller waits, records in the device timer that the device is idle for lack of requests."""
        if not self._is_wanted():
            self.timer.rest()

    def _is_wanted(self) -> bool:
        """Whether a caller waits for a result or has more prompts. Steps in flight may be for aborted requests."""
        return self.scheduler.num_live > 0 or bool(self.scheduler.sources)

    @property
    def has_launched(self) -> bool:
        """Whether a step is launched and not committed."""
        return bool(self.in_flight) or self._headless is not None

    @property
    def num_untimed(self) -> int:
        """Launched steps whose device time is not recorded yet."""
        return len(self.in_flight) + len(self._untimed)

    def has_requests(self) -> bool:
        """Whether `step` has something to do, for requests of this engine or for processes that share its model."""
        if self.has_launched or self.scheduler.has_requests() or self.scheduler.sources:
            return True
        return self.peers is not None and self.peers.is_waited_for()

    def runs_far_ahead(self) -> bool:
        """Whether enough device time is in flight, so that another step is not due."""
        return bool(self.in_flight) and not self.in_flight[-1].done() and self.pace.is_early()

    def step(self) -> list[Output]:
        """Launch a step if there is one, and commit the oldest step once enough are in flight."""
        self._check_alive()
        self.timer.enter()
        try:
            outputs = self._advance()
            self._free_queries_if_idle()
            self._store_if_idle()
            return outputs
        except BaseException as error:
            self._failure = error  # scheduler and runner may now disagree about what was launched
            if not isinstance(error, Exception):
                raise
            if self.recorder is not None:
                save_failure(self.recorder, error)
            raise EngineDead(f"the engine failed in step {self.num_steps}: {error}; start a new one") from error
        finally:
            self.timer.leave(self._is_wanted())

    def _advance(self) -> list[Output]:
        if self.scheduler.sources and not self._take_prompts():
            return []  # the call ends without a step
        if self.runs_far_ahead():
            # nothing is launched now, but results should not wait for the next launch
            if self.in_flight[0].done():
                return self._commit()
            self._wait_until_due()
            return self.scheduler.take_failures()
        outputs = self.scheduler.advance_grammars(wait=False)
        self.scheduler.limit_tokens(self.pace.max_num_tokens(), readers_wait=self.readers_wait)
        plan = self.scheduler.plan()
        if self._headless is not None:
            outputs += self._finish_headless()
        if plan is None and self.peers is not None:
            self.peers.follow()
        if plan is not None:
            outputs += self._launch(plan)
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            return outputs + self._commit()
        if plan is None and (busy := next((each for each in self._background if each.is_waiting), None)) is not None:
            self._wait_for(busy)
        return outputs + self.scheduler.take_failures()

    def drain(self) -> list[Output]:
        """Commit all steps in flight, and wait until the device has ended them."""
        outputs = [] if self._headless is None else self._finish_headless()
        while self.in_flight:
            outputs += self._commit()
        while self._untimed:
            self._untimed[0][0].wait_until_ended()
            self._record_times()
        return outputs

    def _wait_until_due(self) -> None:
        self.timer.waits()
        self.pace.wait_until_due()
        self.timer.waited()

    def _wait_for(self, background: Background) -> None:
        """Wait until a background thread has finished something: no step can be planned before."""
        self.timer.waits()
        background.wait()
        self.timer.waited()

    def _launch(self, plan: StepPlan) -> list[Output]:
        self._keep_room()  # aborted requests may have left steps without results
        self._launcher.launch(plan)
        self._causes.append(self.timer.launched())
        outputs: list[Output] = []
        if self.constraints is None or not self.constraints.is_drawing:
            self._finish(plan, None)
            return outputs
        # masks depend on the tokens of all older steps; the device is busy with this step's forward meanwhile
        while self.in_flight:
            outputs += self._commit()
        self._headless = plan
        if not self.constraints.launch(self.pace.expected(plan)):
            outputs += self._finish_headless()
        return outputs

    def _finish_headless(self) -> list[Output]:
        """Launch the head of the step that waits for masks."""
        plan, self._headless = self._headless, None
        assert plan is not None and self.constraints is not None
        outputs = self.scheduler.advance_grammars(wait=True)
        late = self.constraints.late()
        if late.sit_out is not None:
            self.scheduler.sit_out(plan.step, self.constraints.sitting)
        self._finish(plan, late)
        return outputs

    def _finish(self, plan: StepPlan, late: DrawEdits | None) -> None:
        handle = self._launcher.finish(late)
        self.in_flight.append(handle)
        self.timer.follow(handle.interval)
        self.pace.launched(plan, self.timer.host_seconds)
        if self.step_log is not None:
            self.step_log.launched(plan, self.timer.host_seconds)
        self.num_steps += 1

    def _commit(self) -> list[Output]:
        """Process the oldest step's result. The host waits for the device only here and in `_keep_room`."""
        handle, cause = self.in_flight.popleft(), self._causes.popleft()
        self._untimed.append((handle, cause))
        has_no_result = handle.has_no_result
        self.timer.waits()
        result = handle.wait()
        self.timer.waited()
        if self.step_log is not None:
            self.step_log.committed(result)
        if has_no_result:
            self._keep_room()
        # the step that was waited for has ended, and all before it
        while self._untimed and (not has_no_result or self._untimed[0][0].done()):
            self._record_times()
        if self.recorder is not None:
            self.recorder.committed(result)
        return self.scheduler.commit(result)

    def _keep_room(self) -> None:
        """Wait for the oldest step without a result when every ring buffer is in use."""
        if len(self._untimed) + len(self.in_flight) > self.depth + 1:
            self.timer.waits()
            self._untimed[0][0].wait_until_ended()
            self.timer.waited()
            self._record_times()

    def _record_times(self) -> None:
        handle, cause = self._untimed.popleft()
        busy = self.timer.record(handle.interval, cause)
        self.pace.committed(busy, 0.0 if cause == "no_requests" else self.timer.gap)
        if self.step_log is not None:
            self.step_log.ended(busy, self.timer.gap, self.timer.late, cause)

    def _free_queries_if_idle(self) -> None:
        """Frees queries that no request needs any more, if no next plan will free them: there are no requests."""
        if not self.has_requests() and (freed := self.scheduler.take_freed_queries()):
            self.executor.free_queries(freed)

    def _store_if_idle(self) -> None:
        """Stores free pages in the second tier, if no next plan will: there are no requests."""
        cache = self.scheduler.cache
        if self.tier is not None and cache is not None and not self.has_requests():
            while (plan := cache.take_tier_plan()) is not None:
                self.tier.copy(plan)

    def join_handoff(self, handoff: Handoff) -> None:
        """From now on exchange pages with other engines."""
        self.handoff = handoff
        if handoff.imports is not None and self.scheduler.cache is not None:
            self.scheduler.cache.imports = handoff.imports
            self._background.append(handoff.imports)

    def close(self) -> None:
        if self.handoff is not None:
            self.handoff.close()
        self.in_flight.clear()
        self._headless = None
        self._untimed.clear()
        for each in self._background:
            each.close()
        if self.recorder is not None:
            self.recorder.clear()
        self.executor.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            cause = str(self._failure) or type(self._failure).__name__
            raise EngineDead(f"the engine has failed before: {cause}; start a new one") from self._failure


class _Requests:
    """The prompts of a source as requests of a scheduler. The time to take them does not count as the core's."""

    def __init__(self, source: PromptSource, make: Callable[[Submit], object], timer: DeviceTimer) -> None:
        self._source = source
        self._make = make
        self._timer = timer
        self.is_ready = source.is_ready
        self.fail = source.fail

    def take(self, limit: int) -> list[object]:
        self._timer.leave(has_requests=True)
        messages = self._source.take(limit)
        self._timer.enter()
        return [*map(self._make, messages)]


# Makes scheduler requests from Submit messages: applies defaults and derives seeds.


def encoder_request(message: Submit, config: EngineConfig, number: int) -> EncoderRequest:
    """For an encoder, which computes whole prompts."""
    params = message.params
    assert isinstance(params, PoolingParams) and params.task is not None, "inputs refuse what this model cannot do"
    return EncoderRequest(
        message.request_id,
        message.prompt_token_ids,
        params,
        message.type_start,
        message.num_seen,
        message.caller,
        message.lora,
    )


def requests_of(message: Submit, config: EngineConfig, number: int) -> list[Request]:
    """For a model with a cache: one request per sample. `number`: of the message, in order of submission."""
    if isinstance(message.params, PoolingParams):
        return [_pooling_request(message, message.params)]
    return _samples(message, message.params, config, number)


def _pooling_request(message: Submit, params: PoolingParams) -> Request:
    assert params.task is not None, "inputs name the task"
    assert message.type_start is None is message.num_seen, "only models of whole prompts have types and unseen tokens"
    ids = message.prompt_token_ids
    return Request(
        message.request_id,
        ids,
        params,
        priority=message.priority,
        caller=message.caller,
        cache_salt=message.cache_salt,
        max_length=len(ids) + 1,
        lora=message.lora,
    )


def _samples(message: Submit, params: SamplingParams, config: EngineConfig, number: int) -> list[Request]:
    assert -1 not in (params.logprobs, params.prompt_logprobs), "InputProcessor replaces -1 by the vocabulary size"
    limit = config.scheduler.max_model_len
    length = len(message.prompt_token_ids)
    max_length = limit if params.max_tokens is None else min(limit, length + params.max_tokens)
    seed = _mix(config.scheduler.seed, number) if params.seed is None else params.seed & (2**64 - 1)
    end_ids = () if params.ignore_eos else config.model.info.eos_token_ids
    bad_words = tuple(map(tuple, message.bad_words))
    embeds = None if message.prompt_embeds is None else message.prompt_embeds.array()
    return [
        Request(
            message.request_id,
            message.prompt_token_ids,
            params,
            sample=sample,
            priority=message.priority,
            caller=message.caller,
            cache_salt=message.cache_salt,
            stop_ids=(*end_ids, *params.stop_ids),
            bad_words=bad_words,
            thinking=message.thinking,
            max_length=max_length,
            seed=seed,
            lora=message.lora,
            embeds=embeds,
            images=message.images,
        )
        for sample in range(params.n)
    ]


def _mix(seed: int, number: int) -> int:
    """A 64-bit seed for a request without one, from the engine's seed and the request's number."""
    x = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)
