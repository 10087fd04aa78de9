"""Times of steps: what is logged while it is read, and the trace made from it."""

from __future__ import annotations

import json

import msgspec
import pytest

from scripted_engine import scripted_core, submit
from slipstream import LLM, SamplingParams
from slipstream.engine.lanes import Lanes
from slipstream.record.step_log import LaneLog, StepLog, chrome_trace
from slipstream.transport.client import KEPT_SECONDS, Inspector, StepTable
from slipstream.transport.frames import Inspect
from small_model import write_small


def run(core):
    while core.has_requests():
        core.step()


def test_sizes_of_steps_are_logged_from_the_first_read_on():
    core = scripted_core(depth=1, max_num_batched_tokens=8)
    core.submit(submit("before", [1, 2], max_tokens=4))
    core.step()  # in flight when the log starts
    log = StepLog({"one": core})
    core.submit(submit("a", list(range(1, 11)), max_tokens=3))
    run(core)
    assert [step.number for step in log.steps] == list(range(len(log.steps))) and log.num_steps == len(log.steps)
    assert sum(step.prefill_tokens for step in log.steps) == 10
    assert sum(step.drawn for step in log.steps) == 3 + 3, "the step that was in flight is not logged"
    first = log.steps[0]
    assert (first.rows, first.tokens, first.prefill_tokens) == (2, 8, 7)
    assert first.num_pages == 63 and first.free_pages < 63


def test_device_times_follow_the_devices_clock_and_the_launch():
    core = scripted_core()
    log = StepLog({"one": core})
    now = [100.0]
    lane = LaneLog(log, 0, core, clock=lambda: now[0])
    core.submit(submit("a", [1, 2], max_tokens=5))
    for seconds, ends in (
        (0.5625, (0.5, 0.0, 0.0, "no_requests")),
        (1.0, (0.25, 0.125, 0.0, "turnaround")),
        (7.0, (0.25, 5.0, 0.5, "host_late")),
        (0.5, (0.25, 9.0, 0.0, "host_late")),
        (0.0, (0.25, 0.125, 0.0, "turnaround")),
    ):
        lane.launched(core.scheduler.plan(), 0.01)
        now[0] += seconds
        lane.ended(*ends)
    first, second, third, fourth, fifth = log.steps
    assert (first.start, first.end) == (100.0, 100.5)
    assert (second.start, second.end) == (100.625, 100.875)
    assert (third.start, third.end) == (105.875, 106.625), "it waited for a mask"
    assert (fourth.start, fourth.end) == (108.8125, 109.0625), "the device's clock is ahead: the step has ended"
    assert (fifth.start, fifth.end) == (109.0625, 109.3125), "steps do not overlap"


def test_an_inspector_logs_while_it_is_asked():
    core = scripted_core()
    now = [0.0]
    inspector = Inspector(Lanes({"one": core}), clock=lambda: now[0])

    def read(since: int) -> StepTable:
        answer = inspector.answer(Inspect("c", "steps", since))
        assert answer.error is None
        return msgspec.msgpack.decode(answer.data, type=StepTable)

    assert core.step_log is None
    assert read(-1).next == 0 and core.step_log is not None
    core.submit(submit("a", [1, 2], max_tokens=5))
    run(core)
    table = read(2)
    assert table.models == ["one"] and [step.number for step in table.steps] == [2, 3, 4] and table.next == 5
    assert read(5).steps == [] and read(-1).steps == []
    assert [step.number for step in read(99).steps] == [0, 1, 2, 3, 4], "the number of an older log"
    inspector.drop_unread()
    assert core.step_log is not None
    now[0] += KEPT_SECONDS + 1
    inspector.drop_unread()
    assert core.step_log is None


def test_a_question_that_cannot_be_answered_is_an_error_and_not_the_end():
    inspector = Inspector(Lanes({"one": scripted_core()}))
    assert "record_steps" in inspector.answer(Inspect("c", "record")).error
    assert "no model two" in inspector.answer(Inspect("c", "record", model="two")).error


@pytest.mark.parametrize("depth", [0, 1])
def test_a_trace_of_an_llm_has_host_and_device_lanes_and_gaps(tmp_path, depth):
    model = write_small(tmp_path / "model")
    options = dict(load_format="dummy", skip_tokenizer_init=True, num_threads=1, use_tqdm_on_load=False, depth=depth)
    with LLM(model, **options) as llm:
        with llm.trace(tmp_path / "trace.json"):
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        assert llm.core.step_log is None
        total = llm.core.timer.total
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(names) == ["host", "device", "device idle"]
    spans = {name: [e for e in events if e["ph"] == "X" and e["tid"] == tid] for name, tid in names.items()}
    device = spans["device"]
    assert len(device) == len(spans["host"]) == 6 and device[0]["args"]["prefill_tokens"] == 5
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.2 for a, b in zip(device, device[1:], strict=False)), "they overlap"
    busy = sum(span["dur"] for span in device) / 1e6
    assert busy == pytest.approx(total.busy, rel=0.01)
    idle = sum(event["args"]["seconds"] for event in spans["device idle"])
    assert idle == pytest.approx(total.idle + total.no_requests, rel=0.01)


def test_a_trace_without_steps_is_valid():
    assert len(json.loads(chrome_trace(["m"], []))["traceEvents"]) == 4


@pytest.mark.parametrize("depth", [0, 2])
def test_accepted_drafts_are_logged(tmp_path, depth):
    folder = write_small(tmp_path)
    options = dict(load_format="dummy", skip_tokenizer_init=True, max_model_len=128, num_pages=64, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    with LLM(folder, **options, depth=depth, num_threads=1, drafts="ngram:3", use_tqdm_on_load=False) as llm:
        llm.core.scheduler.drafts.length = None  # as many drafts in every step, whatever they cost
        before = llm.core.scheduler.drafts.counts
        stream = llm.stream([1, 2, 3, 1, 2, 3], params)
        next(stream)  # steps of it may be in flight when the log starts
        start = (before.num_drafts, before.num_accepted)
        with llm.trace(tmp_path / "trace.json"):
            log = llm.core.step_log._log
            list(stream)
        after = llm.core.scheduler.drafts.counts
        drafts, accepted = (sum(getattr(step, name) for step in log.steps) for name in ("drafts", "accepted"))
    assert 0 < accepted <= drafts
    assert drafts <= after.num_drafts - start[0] and accepted <= after.num_accepted - start[1]
    if depth == 0:
        assert (drafts, accepted) == (after.num_drafts - start[0], after.num_accepted - start[1])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    told = [
        event["args"]["accepted"] for event in events if event.get("tid") == 2 and "drafts" in event.get("args", {})
    ]
    assert sum(told) == accepted
