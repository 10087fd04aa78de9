"""The flight recorder: a recording is complete, bounded, readable, and replays to the same tokens."""

from __future__ import annotations

import importlib.metadata
import os
import stat
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

import slipstream
from letter_tokenizer import make_constraints
from mask_table import MaskTable
from scripted_engine import scripted_core, submit
from slipstream import LLM, SamplingParams
from slipstream.base.errors import EngineDead, InvalidOption, UserError
from slipstream.config.config import RecordConfig
from slipstream.engine.core import EngineCore
from slipstream.engine.lanes import Sleeper
from slipstream.params.structured import StructuredOutputsParams as Shape
from slipstream.record.plan_checker import PlanChecker
from slipstream.record.record_file import MAGIC, MAX_FILES, Recording, decode
from slipstream.record.recorder import Recorder
from slipstream.record.replay import replay
from slipstream.runner.build import build_runner
from small_model import write_small

OPTIONS: dict[str, Any] = dict(
    load_format="dummy", skip_tokenizer_init=True, dtype="float64", num_threads=1, page_size=4, num_pages=64,
    max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, use_tqdm_on_load=False,
)  # fmt: skip
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 11], [20, 21], [3] * 30]


def recorded(core: EngineCore, num_steps: int = 1000, **more: int) -> Recorder:
    core.config.record = RecordConfig(num_steps)
    core.config.model.load_format, core.config.model.seed = "dummy", 0
    core.recorder = Recorder(core.executor, core.config, **more)
    return core.recorder


def run(core: EngineCore) -> None:
    while core.has_requests():
        core.step()


def scripted_recording(depth: int = 1, num_steps: int = 1000) -> Recording:
    """Of requests that share prefixes, with chunks, and preemptions for lack of pages."""
    core = scripted_core(depth, num_pages=14, max_num_seqs=3, max_num_batched_tokens=8)
    recorder = recorded(core, num_steps)
    core.submit(submit("first", PROMPTS[0], max_tokens=9))
    run(core)
    for number, prompt in enumerate(PROMPTS):
        core.submit(submit(f"r{number}", prompt, max_tokens=21))
    run(core)
    assert core.scheduler.num_preemptions > 0, "the test is meant to preempt"
    assert core.scheduler.cache.num_hits > 0, "the test is meant to hit the prefix cache"
    return recorder.take()


def test_a_package_without_installed_metadata_records_its_version(monkeypatch):
    """As when it is run from its sources, with PYTHONPATH."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert scripted_recording().slipstream == slipstream.__version__


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_plans_of_the_scheduler_have_no_fault(depth):
    recording = scripted_recording(depth)
    checker = PlanChecker(recording.config)
    rows = [checker.run(step) == set(step.plan.rows.tolist()) for step in recording.steps]
    assert len(rows) > 20 and all(rows), "every row of a recording from the start is complete"


def _other_page(recording: Recording) -> None:
    """Gives a row the page that another running row writes to."""
    pages: dict[int, int] = {}
    for step in recording.steps:
        plan, updates = step.plan, step.plan.new_pages[0]
        pages = {row: page for row, page in pages.items() if row not in plan.released}
        for row, page in zip(updates.rows.tolist(), updates.pages.tolist(), strict=True):
            if taken := [other for other in pages if other != row and other in plan.rows]:
                new = np.where(updates.pages == page, pages[taken[0]], updates.pages).astype(np.int32)
                step.plan = replace(plan, new_pages=(replace(updates, pages=new),))
                return
            pages[row] = page
    raise AssertionError("no two rows run together")


def _twice(recording: Recording) -> None:
    """Admits a row that has an owner."""
    step = next(step for step in recording.steps[5:] if step.plan.admitted)
    step.plan = replace(step.plan, released=np.zeros(0, np.int32))
    taken = replace(step.plan.admitted[0], row=int(recording.steps[0].plan.rows[0]))
    step.plan = replace(step.plan, admitted=(*step.plan.admitted, taken, taken))


def _too_far(recording: Recording) -> None:
    step = recording.steps[3]
    step.plan = replace(step.plan, lengths=step.plan.lengths + 1)


def _chunk_first(recording: Recording) -> None:
    """A step of a row that decodes, and of a longer chunk, in the other order."""
    step = next(step for step in recording.steps if step.plan.num_tokens[0] == 1 < step.plan.num_tokens[-1])
    order = np.arange(len(step.plan.rows))[::-1]
    arrays = ("rows", "num_tokens", "lengths", "num_drawn", "num_host_tokens")
    step.plan = replace(step.plan, **{name: getattr(step.plan, name)[order] for name in arrays})


def _missing_step(recording: Recording) -> None:
    del recording.steps[4]


@pytest.mark.parametrize(
    ("fault", "said"),
    [(_other_page, "page|tokens|write"), (_twice, "owner"), (_too_far, "planned to"), (_missing_step, "follows"),
     (_chunk_first, "longer chunk")],
)  # fmt: skip
def test_a_planted_fault_of_the_scheduler_is_found(fault, said):
    recording = scripted_recording()
    assert replay(recording).fault is None
    fault(recording)
    found = replay(recording).fault
    assert found is not None and any(word in found for word in said.split("|")), found


def test_rows_from_before_the_ring_are_checked_by_position_only():
    recording = scripted_recording(num_steps=12)
    assert len(recording.steps) == 12 and recording.generated
    checker = PlanChecker(recording.config, recording.generated)
    complete = [checker.run(step) for step in recording.steps]
    before = {each.row for each in recording.generated}
    assert not complete[0] & before


def test_steps_before_an_exchange_of_weights_are_dropped_with_their_rows():
    core = scripted_core(1)
    recorder = recorded(core)
    for number, prompt in enumerate(PROMPTS[:2]):
        core.submit(submit(f"r{number}", prompt, max_tokens=12))
    for _ in range(5):
        core.step()
    core.weights = Mock(num_missing=0)
    Sleeper({"m": core}).update_weights({"a": "tensor"})
    assert recorder.take().steps == [] and len(recorder.take().generated) == 2 and recorder._num_bytes == 0
    run(core)
    recording = recorder.take()
    assert recording.exchanged and recording.steps[0].plan.released.size == 2
    assert replay(recording).fault is None
    Sleeper({"m": core}).update_weights()  # from the model's files
    assert not recorder.take().exchanged


def test_the_ring_is_bounded_in_steps_and_bytes():
    core = scripted_core()
    recorder = recorded(core, 5)
    core.submit(submit("a", [1, 2, 3], max_tokens=20))
    run(core)
    assert [step.plan.step for step in recorder.take().steps] == list(range(15, 20))
    core = scripted_core()
    recorder = recorded(core, 1000, max_bytes=5000)
    core.submit(submit("a", [1, 2, 3], max_tokens=20))
    run(core)
    assert 1 < len(recorder.take().steps) < 6 and recorder._num_bytes <= 5000


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("model"))


def test_a_file_replays_to_the_same_tokens_and_names_the_first_step_that_differs(small):
    with LLM(small, depth=1, **OPTIONS) as llm:
        params = [
            SamplingParams(max_tokens=6, temperature=0.7, seed=3),
            SamplingParams(max_tokens=9, temperature=0),
            SamplingParams(max_tokens=5, repetition_penalty=1.3),
            SamplingParams(max_tokens=7, min_tokens=3, logprobs=2),
        ]
        llm.generate(PROMPTS, params)
        llm.generate(PROMPTS[1:], params[1:])  # from cached prefixes
        data = llm.core.recorder.take().encode()
        late = llm.core.recorder.take()
        late.generated = list(late.steps[0].plan.admitted)
        late.steps = late.steps[2:]
    recording = decode(data, "file")
    assert msgspec.to_builtins(recording.config.scheduler) == msgspec.to_builtins(late.config.scheduler)

    def again(recording: Recording) -> Any:
        runner, _ = build_runner(recording.config)
        try:
            return replay(recording, runner)
        finally:
            runner.close()

    report = again(recording)
    assert (report.fault, report.difference, report.error, report.num_skipped) == (None, None, None, 0)
    assert report.num_steps == len(recording.steps) and report.num_compared == 6 + 9 + 5 + 7 + 9 + 5 + 7

    step = next(step for step in recording.steps[6:] if len(step.tokens) > 1)
    step.tokens = step.tokens.copy()
    step.tokens[1] = (step.tokens[1] + 1) % 64
    report = again(decode(recording.encode(), "file"))
    assert report.difference is not None and report.difference.startswith(f"step {step.plan.step}: row ")

    report = again(late)  # some rows began before the first step
    assert report.difference is None and report.error is None and report.num_skipped > 0 and report.num_compared > 0


def test_rows_that_read_cached_drafts_are_compared(small):
    """An accepted draft was never a token of a plan; its page has it all the same."""
    with LLM(small, depth=1, drafts="ngram:2", **OPTIONS) as llm:
        llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
        params = SamplingParams(max_tokens=16, temperature=0)
        first = llm.generate([PROMPTS[3][:6]], params)[0].outputs[0]
        assert llm.core.scheduler.drafts.counts.num_accepted > 0, "the test is meant to accept drafts"
        again = llm.generate([PROMPTS[3][:6] + list(first.token_ids)], params)[0]
        assert again.num_cached_tokens > 8, "the test is meant to hit pages with drafts"
        recording = llm.core.recorder.take()
    checker = PlanChecker(recording.config)
    for step in recording.steps:
        assert checker.run(step) == set(step.plan.rows.tolist())


def test_a_redacted_file_has_no_content_of_requests_and_can_still_be_checked(small):
    secret = [41, 42, 43, 44, 45, 46]
    with LLM(small, depth=0, **OPTIONS) as llm:
        words = SamplingParams(max_tokens=3, stop_token_ids=[59], logit_bias={47: 1.0}, presence_penalty=0.5)
        llm.generate([secret], words)
        recorder = llm.core.recorder
        plain, data = recorder.take(), recorder.take().encode(redact=True)
    recording = decode(data, "file")
    assert recording.redacted and replay(recording).fault is None
    assert plain.steps[0].plan.tokens.tolist() == secret, "the recorder's own data are not changed"
    for step in recording.steps:
        assert not step.plan.tokens.any() and not step.tokens.any()
        for admission in step.plan.admitted:
            assert admission.history is None or not admission.history.any()
            assert admission.stop_ids == () and not admission.params.stop_token_ids and not admission.params.logit_bias


def test_files_are_written_by_size_while_the_engine_runs(small, tmp_path):
    with LLM(small, depth=1, record_dir=str(tmp_path), record_every_mb=1, **OPTIONS) as llm:
        writer = llm.core.recorder._writer
        assert writer._num_bytes == 2**20
        writer._num_bytes = 5000
        for _ in range(MAX_FILES + 2):
            llm.generate(PROMPTS[:2], SamplingParams(max_tokens=8))
            writer._job.result(30)
    files = sorted(tmp_path.iterdir())
    assert len(files) == MAX_FILES and stat.S_IMODE(files[0].stat().st_mode) == 0o600
    for file in files:
        recording = decode(file.read_bytes(), file.name)
        assert replay(recording).fault is None
        assert all(step.tokens is not None for step in recording.steps), "steps in flight are left out"


def test_a_failure_writes_a_private_file(small, tmp_path, caplog):
    folder = tmp_path / "records"
    folder.mkdir()
    for number in range(MAX_FILES + 2):  # since written, the clock was set back by an hour
        (folder / f"failure-2000010{number}-1.slipstream").write_bytes(b"")
        os.utime(folder / f"failure-2000010{number}-1.slipstream", (time.time() + 3600,) * 2)
    with LLM(small, depth=0, record_dir=str(folder), **OPTIONS) as llm:
        llm.generate([[1, 2]], SamplingParams(max_tokens=2))
        llm.core.scheduler.commit = None  # a fault of the host half: the executor does not see it
        with pytest.raises(EngineDead):
            llm.generate([[1, 2]], SamplingParams(max_tokens=2))
    files = sorted(folder.iterdir())
    assert len(files) == MAX_FILES and str(files[-1]) in caplog.text
    assert stat.S_IMODE(files[-1].stat().st_mode) == 0o600
    recording = decode(files[-1].read_bytes(), "file")
    assert "TypeError" in recording.failure and len(recording.steps) == 3


def test_what_is_not_a_recording_is_refused(small):
    with pytest.raises(UserError, match="not a recording"):
        decode(b"PK", "x.zip")
    with pytest.raises(UserError, match="cannot be read"):
        decode(MAGIC + b"1234", "x")
    with pytest.raises(InvalidOption, match="record_steps"):
        LLM(small, record_steps=-1, **OPTIONS)
    with pytest.raises(InvalidOption, match="record_every_mb is 5, set, and record_steps is 0"):
        LLM(small, record_steps=0, record_every_mb=5, **OPTIONS)


def test_logprobs_do_not_stay_in_memory(small):
    with LLM(small, depth=0, **OPTIONS) as llm:
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=4, logprobs=50))
        for step in llm.core.recorder._ring:
            assert step.tokens.base is None and step.failed.base is None


def test_without_steps_there_is_no_recorder(small):
    with LLM(small, record_steps=0, **OPTIONS) as llm:
        assert llm.core.recorder is None


@pytest.mark.parametrize("depth", [0, 1])
def test_masks_of_grammars_are_not_copied_and_are_in_the_recording(depth):
    constraints = make_constraints()
    core = scripted_core(depth, num_pages=14, max_num_seqs=4, max_num_batched_tokens=16, constraints=constraints)
    recorder, sent, table = recorded(core), {}, MaskTable()
    finish = core.executor.finish

    def watched(late=None):
        if late is not None:
            sent[recorder._ring[-1].plan.step] = late.rows.copy(), table.resolved(late).bits
        return finish(late)

    core.executor.finish = watched
    shapes = [Shape(choice=["yes", "not known"]), *[Shape(regex="[a-z]{30}")] * 3]
    for number, shape in enumerate(shapes):
        core.submit(submit(f"r{number}", [number] * 3, max_tokens=25, structured_outputs=shape))
    run(core)
    assert core.scheduler.num_preemptions > 0, "the test is meant to preempt"
    assert all(step.late is None or not step.late.bits.size for step in recorder._ring)
    steps = {step.plan.step: step.late for step in recorder.take().steps if step.late is not None}
    assert steps.keys() == sent.keys() and len(sent) > 10
    for number, (rows, bits) in sent.items():
        assert np.array_equal(steps[number].rows, rows) and np.array_equal(steps[number].bits, bits)
    # masks count when the recording is taken, and rows of steps that are left out are from before
    recorder._max_bytes = recorder._num_bytes + 4 * bits.shape[1]
    short = recorder.take()
    assert 1 < len(short.steps) < len(recorder._ring) and replay(short).fault is None
    constraints.close()
