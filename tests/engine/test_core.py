"""The core's loop over a scripted device: what is committed when, and how it ends."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from scripted_engine import scripted_core, submit, tokens_alone
from slipstream.base.errors import EngineDead, InvalidPrompt, QueueFull, UserError
from slipstream.contracts.messages import Abort, Submit
from slipstream.contracts.request import FinishReason
from slipstream.contracts.step import StepResult
from slipstream.engine.core import EngineCore
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def run(core):
    outputs = []
    while core.has_requests():
        outputs += core.step()
        core.scheduler.check()
    return outputs


@DEPTHS
def test_the_host_waits_once_a_step_and_only_for_the_oldest(depth):
    core = scripted_core(depth)
    message = submit("a", [1, 2, 3], max_tokens=9)
    core.submit(message)
    outputs = run(core)
    assert [token for output in outputs for token in output.token_ids] == tokens_alone(message, 0)[0]
    assert core.num_steps == core.executor.num_waits == 9


def test_a_finished_result_is_returned_while_the_next_launch_is_delayed(monkeypatch):
    """Steps are long, so launching further ahead is of no use; the oldest step's tokens are."""
    core = scripted_core(depth=2)
    core.submit(submit("a", [1, 2, 3], max_tokens=9))
    assert core.step() == core.step() == []  # two are on their way
    monkeypatch.setattr(core.pace, "too_early", lambda: 1.0)
    waits = []
    monkeypatch.setattr(core.pace, "_sleep", waits.append)
    assert core.step() == [] and len(waits) == 1  # none is done
    core.executor.run()
    (output,) = core.step()
    assert len(output.token_ids) == 1 and core.num_steps == 2
    assert len(waits) == 1 and not core.executor.num_waits


def test_a_refused_request_does_not_change_the_samples_of_others():
    """The seed of a request without one depends on its order among accepted requests, not on refused attempts."""
    seeds = []
    for num_refused in (0, 3):
        core = scripted_core(max_waiting=1)
        core.submit(Submit("a", [1], SamplingParams(), 0.0))
        for _ in range(num_refused):
            with pytest.raises(QueueFull):
                core.submit(Submit("b", [1], SamplingParams(), 0.0))
        run(core)
        core.submit(Submit("b", [1], SamplingParams(), 0.0))
        seeds.append(core.scheduler._lifecycle.live["b"][0].seed)
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize("why", ["room", "id", "bug"])
def test_prompts_of_one_call_are_taken_in_together_or_not_at_all(place, why):
    core = scripted_core(max_waiting=5 + place if why == "room" else 99)
    others = [submit(f"other{i}", [i], max_tokens=2) for i in range(5)]
    core.submit(*others)
    group = [Submit(f"r{i}", [i], SamplingParams(max_tokens=2), 0.0) for i in range(5)]
    if why == "id":
        group[place] = submit("other0", [1])
    if why == "bug":
        group[place] = submit("r", [1], logprobs=-1)
    errors = {"room": QueueFull, "id": UserError, "bug": AssertionError}
    words = {"room": "^[0-9]+ requests are waiting", "id": f"prompt {place + 1} of 5: ", "bug": "replaces -1"}
    with pytest.raises(errors[why], match=words[why]):
        core.submit(*group)
    assert core.scheduler.num_waiting == 5 and core._num_submitted == 5  # which others' seeds are made of
    core.scheduler.check()
    ends = {output.request_id for output in run(core) if output.finish_reason}
    assert ends == {message.request_id for message in others}


def test_a_query_that_is_taken_back_with_its_documents_leaves_no_trace():
    core = scripted_core()
    query = Submit("q", [1, 2], PoolingParams(task="token_embed", query_key="q", query_uses=2), 0.0)
    document, bad = (
        Submit(name, ids, PoolingParams(task="token_embed", query_key="q"), 0.0)
        for name, ids in (("d", [3]), ("e", []))
    )
    with pytest.raises(
        InvalidPrompt, match="^the prompt"
    ):  # the sender sorts prompts by length, so an index would mean nothing
        core.submit(query, document, bad)
    assert not core.has_requests() and not core.scheduler.keeps_query("q")


@DEPTHS
@pytest.mark.parametrize("where", ["launch", "finish", "wait"])
def test_a_device_that_breaks_ends_the_engine_with_its_reason(depth, where):
    core = scripted_core(depth)
    core.submit(submit("a", [1, 2, 3], max_tokens=30))
    for _ in range(5):
        core.step()
    core.executor.breaks_at = where
    with pytest.raises(EngineDead, match="the engine failed in step .*device-side assert triggered; start a new one"):
        for _ in range(depth + 1):
            core.step()
    with pytest.raises(EngineDead, match="has failed before: device-side assert"):
        core.step()
    with pytest.raises(EngineDead, match="has failed before: device-side assert"):
        core.submit(submit("b", [1]))
    core.abort(Abort("a"))  # an abort now raises nothing
    core.close()
    assert core.executor.closed


@pytest.mark.parametrize("breaks", [False, True])
def test_an_abandoned_query_is_freed_at_once_unless_the_device_is_broken(breaks):
    core = scripted_core()
    core.submit(Submit("q", [1, 2], PoolingParams(task="token_embed", query_key="q", query_uses=2), 0.0))
    run(core)
    if breaks:
        core.submit(submit("a", [1], max_tokens=5))
        core.executor.breaks_at = "launch"
        with pytest.raises(EngineDead):
            core.step()
        core.abort(Abort("a"))
    core.abort(Abort("q"))
    assert core.executor.freed == ([] if breaks else [0])


@DEPTHS
def test_an_abort_drops_what_is_in_flight_and_frees_the_rest(depth):
    core = scripted_core(depth, num_pages=9)
    gone, stays = submit("gone", [1, 2, 3], n=2, max_tokens=20), submit("stays", [4, 5], max_tokens=20)
    core.submit(gone)
    core.submit(stays)
    outputs = [output for _ in range(4 + depth) for output in core.step()]
    core.abort(Abort("gone"))
    late = run(core)
    assert {output.request_id for output in late} == {"stays"}
    mine = [token for output in outputs + late if output.request_id == "stays" for token in output.token_ids]
    assert mine == tokens_alone(stays, 0)[0]
    assert core.scheduler.cache.num_free == core.scheduler.cache.num_usable


@DEPTHS
def test_the_last_token_in_flight_ends_it_once(depth):
    core = scripted_core(depth)
    for i in range(3):
        core.submit(submit(f"r{i}", [i], max_tokens=1 + i))
    ends = [output for output in run(core) if output.finish_reason is not None]
    assert [(output.request_id, output.finish_reason) for output in ends] == [
        (f"r{i}", FinishReason.LENGTH) for i in range(3)
    ]
    assert core.num_steps == 3  # nothing was launched past a length that is known


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_without_outputs_of_an_aborted_request_do_not_exhaust_the_rings(depth):
    """The core does not wait for steps without outputs, so after an abort they still occupy ring buffers."""
    core = scripted_core(depth, max_num_batched_tokens=4)
    device = core.executor
    finish, most = device.finish, 0

    def finish_silently(late=None):
        nonlocal most
        most = max(most, len(device.handles) + 1)
        return SilentHandle(finish())

    device.finish = finish_silently
    for name, first in (("a", 1), ("b", 101)):
        core.submit(submit(name, list(range(first, first + 48)), max_tokens=2))
        for _ in range(6):
            core.step()
        core.abort(Abort(name))
        while core.has_requests():
            core.step()
    assert most == depth + 2  # as many as there are buffers


@pytest.mark.parametrize(("readers_wait", "num_rows"), [(True, 1), (False, 3)])
def test_steps_of_whole_prompts_are_short_only_while_tokens_of_others_are_read(monkeypatch, readers_wait, num_rows):
    config, plans = scripted_core(depth=1).config, []
    config.scheduler = msgspec.structs.replace(config.scheduler, is_encoder=True, chunked_prefill=False)
    handle = SimpleNamespace(has_no_result=False, interval=None, done=lambda: False)
    core = EngineCore(config, SimpleNamespace(launch=plans.append, finish=lambda late: handle))
    monkeypatch.setattr(core.pace, "max_num_tokens", lambda: 20)
    for name in "abc":
        core.submit(Submit(name, [1] * 16, PoolingParams(task="embed"), 0.0))
    core.readers_wait = readers_wait
    core.step()
    assert [len(plan.rows) for plan in plans] == [num_rows]


class SilentHandle:
    has_no_result = True
    interval = None

    def __init__(self, handle):
        self.handle = handle

    def done(self):
        return self.handle.done()

    def wait(self):
        return StepResult(np.zeros(0, np.int32), np.zeros(0, np.bool_))

    def wait_until_ended(self):
        self.handle.wait()
