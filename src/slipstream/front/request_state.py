"""Per-request state in the front end, to which the core's outputs are applied, and the stream of a reader's requests.

Text is detokenised as late as possible: once at the end without streaming, when the reader takes an increment with
streaming, and token by token only where stop strings must be found. Text that was returned never changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from slipstream.base.errors import InvalidParams, UserError
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.contracts.messages import Output, Submit
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.pooling_results import PoolingRequestOutput, wrap
from slipstream.front.results import (
    CompletionOutput,
    Increment,
    Logprob,
    LogprobList,
    LogprobStore,
    RequestMetrics,
    RequestOutput,
    new_store,
)
from slipstream.front.sample_state import SampleState
from slipstream.front.served import ServedModel
from slipstream.metrics.stats import ModelStats
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import RequestOutputKind, SamplingParams
from slipstream.text.tokenizer import Tokenizer
from slipstream.transport.inline import InlineClient, next_step

_FIRST_INCREMENT = 2**30  # `unread` before the first increment: more tokens than any stream interval


class RequestState:
    """One request: what generation and pooling have in common."""

    mailbox: Mailbox  # of the reader
    submitted = 0.0  # monotonic seconds when its stream was opened
    stats: ModelStats | None = None  # the model's counters and histograms
    begun = 0.0  # monotonic seconds when the core started to compute the prompt; 0 before
    is_query = False  # a late-interaction query, which the core keeps after its result until it is aborted
    unread = 0  # tokens since the last increment
    samples: Sequence[SampleState] = ()
    num_cached = 0  # prompt tokens found in the prefix cache
    refused: UserError | None = None  # the core found a parameter wrong after the request was submitted

    def __init__(self, message: Submit, prompt: str | None, *, streaming: bool) -> None:
        self.id = self.name = message.request_id  # `name`: of the results; the id unless the caller chose it
        self.message = message
        self.streaming = streaming
        self.queued = True  # until the first output
        self.prompt = prompt
        self.finished = False

    def take(self, output: Output, now: float) -> bool:
        """Applies an output. Returns whether a stop string ended a sample that the core still computes."""
        raise NotImplementedError

    def abort(self) -> None:
        """Finishes the request with what has been computed so far."""
        self.finished = True

    def count_begin(self, stats: ModelStats) -> None:
        """Counts the prompt, and from now on the request, in these statistics."""
        self.stats = stats
        num_tokens = len(self.message.prompt_token_ids)
        stats.prompt_tokens += num_tokens
        stats.prompt_length.observe(num_tokens)

    def count_end(self) -> None:
        """Updates the statistics, when the request is finished or its reader is gone."""
        if (stats := self.stats) is not None:
            stats.e2e.observe(time.monotonic() - self.submitted)
            stats.cached_tokens += self.num_cached
            for reason in self._finish_reasons():
                stats.finished[reason] = stats.finished.get(reason, 0) + 1

    def _finish_reasons(self) -> list[str]:
        raise NotImplementedError

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all samples so far; for pooling, tokens of the prompt."""
        raise NotImplementedError

    def result(self) -> Any:
        """Returns a RequestOutput, or for pooling a PoolingRequestOutput."""
        raise NotImplementedError

    def next_result(self) -> Any:
        """Returns the next result of a stream, or None. Pooling has one."""
        return self.result() if self.finished else None


class GenerationRequestState(RequestState):
    """A generation request: its samples, logprobs of its prompt, and times."""

    def __init__(self, message: Submit, prompt: str | None, tokenizer: Tokenizer | None, *, streaming: bool) -> None:
        super().__init__(message, prompt, streaming=streaming)
        params = message.params
        assert isinstance(params, SamplingParams)
        self.samples = [SampleState(i, params, tokenizer, streaming=streaming) for i in range(params.n)]
        self.unread = _FIRST_INCREMENT
        self._prompt_logprobs: LogprobStore | None = None  # of the second token and all after it
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = new_store(1 + params.prompt_logprobs, tokenizer if params.detokenize else None)
        self.metrics = RequestMetrics(message.arrival_time)

    def take(self, output: Output, now: float) -> bool:
        metrics = self.metrics
        if output.param is not None:
            self.refused = InvalidParams(output.error or "", param=output.param)
        if output.prompt_logprobs is not None and self._prompt_logprobs is not None:
            self._prompt_logprobs.take(output.prompt_logprobs)
        if output.token_ids:
            if (stats := self.stats) is not None:
                stats.generated_tokens += len(output.token_ids)
                if not metrics.first_token_ts:
                    stats.ttft.observe(now - self.submitted)
                    if self.begun:
                        stats.queue.observe(self.begun - self.submitted)
                        stats.prefill.observe(now - self.begun)
                elif output.sample == 0:  # the other samples get their tokens in the same steps
                    stats.itl.observe(now - metrics.last_token_ts)
            if not metrics.first_token_ts:
                metrics.first_token_ts = now
                metrics.first_token_latency = now - self.submitted
                self.num_cached = output.num_cached_tokens
            metrics.last_token_ts = now
            self.unread += len(output.token_ids)
        sample = self.samples[output.sample]
        stopped = sample.take(output)
        if sample.finish_reason is not None:
            self.finished = all(sample.finish_reason is not None for sample in self.samples)
        return stopped

    @property
    def prompt_logprobs(self) -> LogprobList[dict[int, Logprob] | None] | None:
        """One entry per prompt token so far, None for the first. None if the request has no prompt_logprobs."""
        store = self._prompt_logprobs
        return None if store is None else LogprobList(store, range(-1, len(store)))

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    def count_end(self) -> None:
        super().count_end()
        if (stats := self.stats) is None:
            return
        if first := self.metrics.first_token_ts:
            stats.decode.observe(self.metrics.last_token_ts - first)
            if self.begun:
                stats.inference.observe(self.metrics.last_token_ts - self.begun)
        stats.output_length.observe(self.num_tokens)

    def _finish_reasons(self) -> list[str]:
        return [str(sample.finish_reason or "abort") for sample in self.samples]

    def abort(self) -> None:
        for sample in self.samples:
            sample.abort()
        super().abort()

    def increment(self) -> list[Increment]:
        """Returns what is new in each sample since the last call, in time proportional to that. For streaming only."""
        self.unread = 0
        return [new for sample in self.samples if (new := sample.increment()) is not None]

    def next_result(self) -> RequestOutput | None:
        """The next result of a stream, by `output_kind` of the parameters; None if there is none yet."""
        params = self.message.params
        assert isinstance(params, SamplingParams)
        if params.output_kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        if params.output_kind is not RequestOutputKind.DELTA:
            return self.result()
        new = self.increment()
        outputs = [
            CompletionOutput(
                each.index, each.text, each.token_ids, self.samples[each.index].cumulative_logprob, each.logprobs,
                each.finish_reason, each.stop_reason,
            )
            for each in new
        ]  # fmt: skip
        return self._output(outputs) if outputs else None

    def result(self) -> RequestOutput:
        return self._output([sample.result() for sample in self.samples])

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        metrics = self.metrics
        metrics.queued_ts, metrics.scheduled_ts = self.submitted, self.begun
        metrics.num_generation_tokens = self.num_tokens
        return RequestOutput(
            request_id=self.name,
            prompt=self.prompt,
            prompt_token_ids=self.message.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=outputs,
            finished=self.finished,
            metrics=metrics,
            lora_request=self.message.lora,
            num_cached_tokens=self.num_cached,
        )


class PoolingRequestState(RequestState):
    """A pooling request. Its first output is its last."""

    def __init__(self, message: Submit, prompt: str | None, pooling: PoolingInfo) -> None:
        super().__init__(message, prompt, streaming=False)
        assert isinstance(message.params, PoolingParams)
        self.is_query = message.params.is_query
        self.pooling = pooling
        self.output: Output | None = None  # stays None if the request was aborted

    def take(self, output: Output, now: float) -> bool:
        self.output = output
        self.num_cached = output.num_cached_tokens
        self.finished = True
        return False

    def _finish_reasons(self) -> list[str]:
        return ["abort" if self.output is None else "error" if self.output.pooled is None else "pooled"]

    @property
    def num_tokens(self) -> int:
        return len(self.message.prompt_token_ids)

    def result(self) -> PoolingRequestOutput[Any]:
        message, output = self.message, self.output
        params = message.params
        assert isinstance(params, PoolingParams) and params.task is not None
        if output is None or output.pooled is None:
            error = None if output is None else output.error
            return PoolingRequestOutput(self.id, None, message.prompt_token_ids, self.prompt, error=error)
        kind, outputs = wrap(params.task, output.pooled.array(), message.prompt_token_ids, self.pooling)
        return kind(self.id, outputs, message.prompt_token_ids, self.prompt, num_cached_tokens=output.num_cached_tokens)


def open_state(message: Submit, prompt: str | None, stream: RequestStream[Any]) -> RequestState:
    """The state of a new request of a stream. `prompt`: its text, if it has one."""
    served = stream.served
    state: RequestState
    if isinstance(message.params, PoolingParams):
        assert served.description.pooling is not None, f"{message.request_id} needs a pooling model"
        state = PoolingRequestState(message, prompt, served.description.pooling)
    else:
        state = GenerationRequestState(message, prompt, served.tokenizer, streaming=stream.streaming)
    state.mailbox, state.submitted = stream.mailbox, stream.begun
    state.name = state.id if stream.name is None else stream.name
    return state


# RequestStream: the requests of one reader, to which a Mailbox reports which of them have new output.

State = TypeVar("State", bound=RequestState)


class Mailbox:
    """Names the requests that have new output since the reader last looked.

    It holds no results: the reader takes what is new from the RequestState. So the outputs of several steps become one
    increment for a slow reader, no queue grows, and no request waits for a reader.
    """

    __slots__ = ("_is_inline", "_updated", "_error", "_waiter")

    def __init__(self, *, is_inline: bool = False) -> None:
        """`is_inline`: the reader is a coroutine that `InlineClient.call` runs; else it is in an event loop."""
        self._is_inline = is_inline
        self._updated: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, name: str, state: object) -> None:
        self._updated[name] = state
        if self._waiter is not None:
            self._wake()

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error  # the first is the cause
        if self._waiter is not None:
            self._wake()

    async def get(self) -> list[Any]:
        """Returns the states updated since the last call; at least one. Raises if the stream has failed."""
        while not self._updated and self._error is None:
            if self._is_inline:
                await next_step()
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def take(self) -> list[Any]:
        """Returns the states updated since the last call. Raises if there are none and the stream has failed."""
        if self._updated:
            updated, self._updated = list(self._updated.values()), {}
            return updated
        if self._error is not None:
            raise self._error
        return []

    def __bool__(self) -> bool:
        """Whether `take` returns states or raises."""
        return bool(self._updated) or self._error is not None

    def forget_error(self) -> None:
        """The reader is gone. Breaks the reference cycle of an exception and its frames."""
        self._error = None

    def _wake(self) -> None:
        assert self._waiter is not None
        if not self._waiter.done():
            self._waiter.set_result(None)


class Sender(Protocol):
    """The part of `RequestRouter` that a RequestStream uses."""

    @property
    def inline(self) -> InlineClient | None: ...
    @property
    def is_idle(self) -> bool: ...
    def open(self, stream: RequestStream[Any], message: Submit, text: str | None) -> Submit: ...
    def send(self, stream: RequestStream[Any], message: Submit, text: str | None) -> None: ...
    def end(self, stream: RequestStream[Any], *, failed: bool) -> None: ...
    def num_queued(self, served: ServedModel) -> int: ...
    async def until_one_starts(self) -> None: ...


class RequestStream(Generic[State]):
    """One or more requests with one reader. Iterating gives the states with new output, until all are finished.

    A context manager: leaving the `with` block aborts the requests that are not finished.
    """

    def __init__(
        self,
        router: Sender,
        served: ServedModel,
        mailbox: Mailbox,
        *,
        streaming: bool,
        caller: str = "",
        name: str | None = None,
    ) -> None:
        """Without `streaming`, the mailbox names finished requests only. `caller`: see `Submit`; `name`: what the
        results of its one request have as their id."""
        self._router = router
        self.served = served
        self.mailbox = mailbox
        self.streaming = streaming
        self.caller = caller
        self.name = name
        self.is_plain = False  # whether its messages are sent as they are
        self.begun = time.monotonic()
        self.states: list[State] = []

    async def __aiter__(self) -> AsyncIterator[list[State]]:
        num_open = len(self.states)
        while num_open:
            updated = await self.mailbox.get()
            num_open -= sum(state.finished for state in updated)
            yield updated

    async def wait(self) -> list[State]:
        """Returns all states when all requests are finished."""
        num_open = len(self.states)
        while num_open:
            num_open -= sum(state.finished for state in await self.mailbox.get())
        return self.states

    async def feed(
        self, prompts: Iterable[PreparedPrompt], advance: Callable[[State], None] = lambda state: None
    ) -> list[State]:
        """Sends any number of prompts, and returns all states when all requests are finished. `advance` is called with
        each that is.

        Prompts that exceed the core's `max_waiting` are sent as the queue empties, also where other callers fill it. A
        core in this thread takes them itself (`EngineCore.feed`), so that its steps do not wait for the last one.
        """
        if (inline := self._router.inline) is not None:
            return await self._feed_inline(inline, prompts, advance)
        router, submits, num_sent, num_open = self._router, list(prompts), 0, 0
        limit = self.served.description.max_waiting or len(submits)
        while True:
            room = max(limit - router.num_queued(self.served), 0)
            for message, text in submits[num_sent : num_sent + room]:
                router.send(self, message, text)
                num_sent, num_open = num_sent + 1, num_open + 1
            if num_open:
                num_open -= _advance(await self.mailbox.get(), advance)
            elif num_sent < len(submits):
                await router.until_one_starts()
            else:
                return self.states

    async def _feed_inline(
        self, client: InlineClient, prompts: Iterable[PreparedPrompt], advance: Callable[[State], None]
    ) -> list[State]:
        source, num_finished = _Source(self._router, self, prompts), 0
        stop = client.feed(source, self.served.base_name)
        try:
            # requests of other readers continue meanwhile; without those, the steps in flight are completed here
            while (
                not source.has_ended
                or num_finished < len(self.states)
                or self.mailbox  # an error
                or (self._router.is_idle and client.lanes.has_requests())
            ):
                await next_step()
                num_finished += _advance(self.mailbox.take(), advance)
            return self.states
        finally:
            stop()

    def __enter__(self) -> RequestStream[State]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._router.end(self, failed=kind is not None)
        self.mailbox.forget_error()


def _advance(updated: list[Any], advance: Callable[[Any], None]) -> int:
    """Calls `advance` with the states that are finished, and returns their number."""
    num = 0
    for state in updated:
        if state.finished:
            num += 1
            advance(state)
    return num


class _Source:
    """The prompts of a stream as the core takes them (`PromptSource`)."""

    def __init__(self, router: Sender, stream: RequestStream[Any], prompts: Iterable[PreparedPrompt]) -> None:
        self.has_one_priority: bool = getattr(prompts, "has_one_priority", False)
        self.is_ready: Callable[[], bool] = getattr(prompts, "is_ready", lambda: True)
        self.has_ended = False
        self._router = router
        self._stream = stream
        self._prompts = iter(prompts)

    def take(self, limit: int) -> list[Submit]:
        taken: list[Submit] = []
        if self.has_ended:
            return taken
        open_state, stream, is_ready = self._router.open, self._stream, self.is_ready
        try:
            while len(taken) < limit and (not taken or is_ready()):
                message, text = next(self._prompts)
                taken.append(open_state(stream, message, text))
        except StopIteration:
            self.has_ended = True
        except BaseException as error:  # not the core's: those before it are computed until the call ends
            self.fail(error)
        return taken

    def fail(self, error: BaseException) -> None:
        self.has_ended = True
        self._stream.mailbox.fail(error)
