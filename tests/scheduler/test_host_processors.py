"""Logits processors on a scripted device: they see the true tokens at every depth and beside any other request."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from count_calls import count_calls
from letter_tokenizer import TOKENIZER, make_constraints
from patience import PATIENCE
from scripted_engine import scripted_core, submit, tokens_alone
from scripted_tokens import VOCAB, choose, draw
from slipstream.base.errors import InvalidParams
from slipstream.contracts.messages import Abort
from slipstream.contracts.request import FinishReason, Request, Status
from slipstream.contracts.step import DrawEdits, StepResult
from slipstream.params.processors import AdapterLogitsProcessor, LogitsProcessor, MoveDirectionality
from slipstream.params.sampling import SamplingParams
from slipstream.params.structured import StructuredOutputsParams as Shape
from slipstream.scheduler.grammar.constraints import Constraints
from slipstream.scheduler.grammar.grammars import Grammars
from slipstream.scheduler.host_processors import HostProcessors, ProcessorBatch
from slipstream.scheduler.request_processors import RequestProcessors, RowEdit


def green(history):
    """The tokens that a watermark allows: they depend on all tokens before."""
    key = hash(tuple(history))
    return [token for token in range(VOCAB) if hash((key, token)) % 4]


def watermark(prompt, output):
    return green(prompt + output)


watermark.needs = "tokens"


def nudge(output):
    """Biases that change the choice of most tokens."""
    return {(7 * len(output) + 3) % VOCAB: 90.0, 5: -np.inf}


nudge.needs = "tokens"


def flip(prompt, output, logits):
    """Forbids a token that depends on all tokens before."""
    logits[hash((len(prompt), *output)) % VOCAB] = -np.inf
    logits[-20:] = -np.inf
    return logits


def alone(message, sample=0):
    """The tokens of a sample under `watermark`, from the device's hash."""
    tokens = list(message.prompt_token_ids)
    for _ in range(message.params.max_tokens):
        tokens.append(choose(draw(tokens, message.params.seed, sample), set(green(tokens)).__contains__))
    return tokens[len(message.prompt_token_ids) :]


def run(core, limit=3000):
    """Steps until nothing is left. Returns tokens, finish reasons and errors by request and sample."""
    found = {}
    for _ in range(limit):
        if not core.has_requests():
            break
        for output in core.step():
            tokens, _, _ = found.get((output.request_id, output.sample), ([], None, None))
            found[output.request_id, output.sample] = tokens + output.token_ids, output.finish_reason, output.error
        core.scheduler.check()
    assert not core.has_requests(), "it never ends"
    return found


@pytest.fixture
def core_of():
    cores = []

    def make(depth, engine=(), **options):
        constraints = Constraints(Grammars(lambda: TOKENIZER, VOCAB), options.get("max_num_seqs", 8), engine)
        cores.append(scripted_core(depth, constraints=constraints, **options))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


SHARED = list(range(20, 33))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"num_pages": 20}, {"max_num_batched_tokens": 9}, {"max_num_seqs": 1}], ids=str
)
def test_a_watermark_hashes_the_true_tokens(core_of, depth, options, monkeypatch):
    """Together, preempted, in chunks and alone; with several samples and shared prefixes."""
    # a request that sits out steps on a busy machine would leave pages to the others
    monkeypatch.setattr(RequestProcessors, "timed_edit", timed_as_fast)
    core = core_of(depth, **{"num_pages": 200} | options)
    marked = [
        submit(f"m{i}", SHARED + [i], max_tokens=14, n=1 + i % 2, logits_processors=[watermark]) for i in range(4)
    ]
    plain = [submit(f"p{i}", SHARED + [50 + i], max_tokens=20) for i in range(2)]
    core.submit(*marked, *plain)
    found = run(core)
    for message in marked:
        for sample in range(message.params.n):
            assert found[message.request_id, sample][:2] == (alone(message, sample), FinishReason.LENGTH)
    for message in plain:
        assert found[message.request_id, 0][:2] == tokens_alone(message, 0)
    assert (core.scheduler.num_preemptions > 0) == ("num_pages" in options)


def test_all_kinds_give_the_same_tokens_at_every_depth_and_in_any_company(core_of):
    message = submit("m", [3, 4, 5], max_tokens=16, logits_processors=[watermark, nudge, flip])
    found = []
    for depth, crowd in ((0, 0), (1, 0), (2, 0), (0, 5), (1, 5), (2, 5)):
        core = core_of(depth, num_pages=26 if crowd else 64)
        some = [None, [nudge]]
        others = [submit(f"o{i}", [9, i], max_tokens=20, logits_processors=some[i % 2]) for i in range(crowd)]
        core.submit(message, *others)
        found.append(run(core)["m", 0][:2])
    assert found == found[:1] * 6 and len(found[0][0]) == 16
    assert found[0][0] != tokens_alone(message, 0)[0] != alone(message)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_lists_have_no_placeholder_and_grow_by_what_was_drawn(core_of, depth):
    seen = []

    def look(prompt, output):
        seen.append((id(output), list(prompt), list(output)))

    look.needs = "tokens"
    core = core_of(depth)
    core.submit(submit("m", [3, 4], max_tokens=9, logits_processors=[look]), submit("p", [1], max_tokens=12))
    tokens = run(core)["m", 0][0]
    assert len({own for own, _, _ in seen}) == 1
    assert [prompt for _, prompt, _ in seen] == [[3, 4]] * 9
    assert [output for _, _, output in seen] == [tokens[:count] for count in range(9)]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("needs", ["tokens", "logits"])
def test_an_error_ends_its_request_and_no_other(core_of, depth, needs):
    def raises(output, *logits):
        if len(output) == 5:
            raise KeyError("no such word")
        return logits[0] if logits else None

    def with_tokens(output):
        return raises(output)

    def with_logits(output, logits):
        return raises(output, logits)

    call = with_tokens if needs == "tokens" else with_logits
    call.needs = needs
    core = core_of(depth)
    good = submit("good", [8, 9], max_tokens=12, logits_processors=[watermark])
    plain = submit("plain", [7], max_tokens=12)
    core.submit(submit("bad", [3, 4], max_tokens=12, logits_processors=[watermark, call]), good, plain)
    found = run(core)
    tokens, reason, error = found["bad", 0]
    assert (len(tokens), reason) == (5, FinishReason.ERROR)
    assert "at output token 5: KeyError: 'no such word'" in error and f"with_{needs}" in error
    assert found["good", 0][0] == alone(good) and found["plain", 0][:2] == tokens_alone(plain, 0)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (7, "it returned int"),
        ("ab", "it returned str"),
        ([VOCAB], f"token id {VOCAB}; there are 0 to {VOCAB - 1}"),
        ([-1, 4], "token id -1"),
        ([0.5], "give whole numbers"),
        ({VOCAB: 1.0}, f"token id {VOCAB}"),
        ({3: float("nan")}, "nan for token 3"),
        ({3: float("inf")}, "inf for token 3"),
        ({"3": 1.0}, "AttributeError"),
        ([], "logits processors"),
    ],
)
def test_wrong_results_are_errors_of_the_request(core_of, result, words):
    def wrong(output):
        return result

    wrong.needs = "tokens"
    core = core_of(1)
    plain = submit("plain", [7], max_tokens=6)
    core.submit(submit("bad", [3, 4], max_tokens=12, logits_processors=[wrong]), plain)
    found = run(core)
    assert found["bad", 0][1] is FinishReason.ERROR and words in found["bad", 0][2]
    assert found["plain", 0][:2] == tokens_alone(plain, 0)


def test_results_of_several_processors_are_combined():
    edit = RowEdit()
    for each in ([3, 40, 5], np.array([40, 5]), {5: 1.5, 2: -1.0}, None, {5: 2.0}, range(40, 50)):
        edit.add(each, VOCAB)
    bits = np.unpackbits(edit.mask.view(np.uint8), bitorder="little")
    assert bits.nonzero()[0].tolist() == [40] and edit.bias == {5: 3.5, 2: -1.0}
    with pytest.raises(ValueError, match="the limit is 1024"):
        edit.add(dict.fromkeys(range(2000), 1.0), 3000)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_grammar_and_processors_bind_both(core_of, depth):
    core = core_of(depth)

    def even(output):
        return [token for token in range(VOCAB) if token % 2 == 0]

    even.needs = "tokens"
    shape = Shape(regex="[a-zA-Z0-9]{20}")
    core.submit(submit("r", [5, 6], max_tokens=8, structured_outputs=shape, logits_processors=[even]))
    tokens, reason, _ = run(core)["r", 0]
    assert reason is FinishReason.LENGTH and not any(token % 2 for token in tokens)
    assert TOKENIZER.decode(tokens).isalnum()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_slow_processor_sits_out_steps_and_the_others_run_on(core_of, depth, monkeypatch):
    """The slow one waits until another request has drawn a token since, so the others must not wait for it."""
    core = core_of(depth)
    monkeypatch.setattr(RequestProcessors, "timed_edit", timed_as_slow)
    progress = threading.Semaphore(0)
    background = []

    def slow(prompt, output):
        if threading.current_thread() is not threading.main_thread():
            background.append(len(output))
            assert progress.acquire(timeout=PATIENCE), "the others wait for the slow one"
        return green(prompt + output)

    slow.needs = "tokens"
    marked = submit("slow", [3, 4], max_tokens=8, logits_processors=[slow])
    plain = submit("plain", [7], max_tokens=60)
    core.submit(marked, plain)
    found = {}
    while core.has_requests():
        for output in core.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
            if output.request_id == "plain":
                progress.release()
        core.scheduler.check()
    assert found["slow"] == alone(marked) and found["plain"] == tokens_alone(plain, 0)[0]
    assert len(background) >= 5


def timed_as_fast(self, vocab_size):
    return self.token_edit(vocab_size), 0.0


def timed_as_slow(self, vocab_size):
    return self.token_edit(vocab_size), 100.0


def test_aborted_and_preempted_slow_requests_leave_nothing(core_of, monkeypatch):
    monkeypatch.setattr(RequestProcessors, "timed_edit", timed_as_slow)
    core = core_of(1, num_pages=24)
    marked = [submit(f"m{i}", [3 + i, 4], max_tokens=20, logits_processors=[watermark]) for i in range(5)]
    core.submit(*marked)
    for _ in range(9):
        core.step()
    core.abort(Abort("m0"))
    found = run(core)
    assert all(found[message.request_id, 0][0][-5:] == alone(message)[-5:] for message in marked[1:])
    assert core.constraints.num_live == 0 and not core.constraints.is_waiting


class Picky(AdapterLogitsProcessor):
    needs = "tokens"

    @classmethod
    def validate_params(cls, sampling_params):
        if (sampling_params.extra_args or {}).get("level", 0) > 3:
            raise ValueError("level is at most 3")

    def new_req_logits_processor(self, params):
        if "level" not in (params.extra_args or {}):
            return None
        return lambda prompt, output: green(prompt + output)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_adapter_chooses_its_requests(core_of, depth):
    core = core_of(depth, engine=[Picky(None, None, False)])
    marked = submit("m", [3, 4], max_tokens=9, extra_args={"level": 2})
    plain = submit("p", [3, 5], max_tokens=9)
    core.submit(marked, plain)
    with pytest.raises(InvalidParams, match="Picky refuses the request: ValueError: level is at most 3") as refused:
        core.submit(submit("x", [3, 4], extra_args={"level": 4}))
    assert refused.value.param == "extra_args"
    found = run(core)
    assert found["m", 0][0] == alone(marked) and found["p", 0][:2] == tokens_alone(plain, 0)
    assert core.constraints.num_live == 0


class Second(AdapterLogitsProcessor):
    """For the second sample of a prompt only."""

    needs = "tokens"
    number = 0

    def new_req_logits_processor(self, params):
        self.number += 1
        return watermark if self.number == 2 else None


@pytest.mark.parametrize("depth", [0, 1])
def test_an_adapter_chooses_samples_of_one_prompt(core_of, depth):
    core = core_of(depth, engine=[Second(None, None, False)])
    message = submit("m", [3, 4], max_tokens=9, n=2)
    core.submit(message)
    found = run(core)
    assert found["m", 0][:2] == tokens_alone(message, 0) and found["m", 1][0] == alone(message, 1)
    assert core.constraints.num_live == 0


def test_requests_without_processors_commit_nothing_early(core_of):
    core = core_of(2, engine=[Picky(None, None, False)])
    core.submit(submit("p", [3, 5], max_tokens=9))
    lates = []
    finish = core.executor.finish
    core.executor.finish = lambda late=None: lates.append(late) or finish(late)
    run(core)
    assert len(lates) == 9 and not any(lates)


# Batches


class Recorder(LogitsProcessor):
    """Keeps its batch as updates say."""

    def __init__(self):
        self.batch = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, update):
        if update is None:
            return
        for index in update.removed:
            self.batch.pop(index)
        for index, params, prompt, output in update.added:
            self.batch[index] = (params.seed, prompt, output)
        for source, target, kind in update.moved:
            assert kind is MoveDirectionality.UNIDIRECTIONAL
            self.batch[target] = self.batch.pop(source)
        assert sorted(self.batch) == list(range(update.batch_size))

    def apply(self, logits):
        return logits


def test_a_batch_follows_requests_that_come_and_go():
    random = np.random.default_rng(0)
    recorder = Recorder()
    batch = ProcessorBatch(recorder)
    running, number = [], 0
    for _ in range(200):
        for _ in range(int(random.integers(0, 3))):
            request = Request(str(number), [number, 1], SamplingParams(seed=number), max_length=50)
            request.processors = RequestProcessors(request.tokens)
            request.status = Status.RUNNING
            running.append(request)
            number += 1
        for request in [each for each in running if random.random() < 0.2]:
            request.status = Status.FINISHED if random.random() < 0.7 else Status.WAITING
            running.remove(request)
        drawing = [(request, 100 + index) for index, request in enumerate(running) if random.random() < 0.8]
        if not drawing:
            continue
        edit = batch.edit(drawing)
        edit.run(None)
        row_of = {request.params.seed: row for request, row in drawing}
        assert [row_of.get(recorder.batch[index][0], -1) for index in range(len(edit.rows))] == list(edit.rows)
        assert set(row_of.values()) == set(edit.rows) - {-1}
        edit.fail(ValueError("x"))
        assert all("Recorder" in request.processors.error for request, _ in drawing)


# The cost of a step


class Counted(list):
    """Counts the elements that are read."""

    num_read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        Counted.num_read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):
        Counted.num_read += len(self)
        return super().__iter__()


class Instant:
    """A device that draws token 7 for every row at once."""

    def launch(self, plan):
        self.num = int((plan.num_drawn > 0).sum())

    def finish(self, late=None):
        self.late = late
        result = StepResult(np.full(self.num, 7, np.int32), np.zeros(self.num, np.bool_))
        return SimpleNamespace(wait=lambda: result, done=lambda: True, has_no_result=False, interval=None)

    def close(self):
        pass


def operations(num_output, rows=128):
    """Function calls, and elements of the requests' tokens read, of one step after so many output tokens."""

    def last(output):
        return [output[-1], 7]

    def look(prompt, output, logits):
        return logits

    last.needs = "tokens"
    core = scripted_core(
        1, constraints=make_constraints(rows), max_num_seqs=rows, page_size=8192, num_pages=rows * 9 + 1,
        max_num_batched_tokens=rows * 61000, max_model_len=61000,
    )  # fmt: skip
    core.executor = Instant()
    params = SamplingParams(max_tokens=None, logits_processors=[last, look])
    requests = []
    for row in range(rows):
        request = Request(str(row), [3] * (num_output + 3), params, max_length=61000)
        request.num_prompt = 3  # as of a request that returns after a preemption
        core.scheduler.submit([request])
        request.tokens = Counted(request.tokens)
        requests.append(request)
    for _ in range(6):
        core.step()
    assert all(request.status is Status.RUNNING for request in requests)
    Counted.num_read = 0
    with count_calls() as calls:
        core.step()
    assert len(core.executor.late.edits) == rows
    core.close()
    return calls.number, Counted.num_read


def test_a_step_costs_the_same_after_any_number_of_tokens(monkeypatch):
    monkeypatch.setattr(RequestProcessors, "timed_edit", timed_as_fast)
    early, late = operations(64), operations(60_000)
    assert early == late
    assert early[1] <= 2 * 128


def test_the_count_of_operations_sees_a_copy(monkeypatch):
    monkeypatch.setattr(RequestProcessors, "timed_edit", lambda self, vocab_size: (RowEdit(), 0.0))
    monkeypatch.setattr(RequestProcessors, "catch_up", lambda self, tokens: list(tokens))
    assert operations(200)[1] > operations(64)[1] + 128 * 100


def test_an_engine_without_requests_of_its_own_opens_nothing():
    processors = HostProcessors(VOCAB)
    request = Request("r", [1], SamplingParams(), max_length=9)
    processors.open([request])
    assert request.processors is None
    processors.plan([request])
    assert not processors.drawing
    none = DrawEdits(np.zeros(0, np.int32), np.zeros((0, 4), np.int32))
    assert processors.add_to(none, 1.0).edits == ()


def test_masks_along_drafts_of_other_rows_keep_their_offsets():
    """A row with a grammar and drafts, beside a row with a processor."""
    processors = HostProcessors(VOCAB)
    bits = np.full((3, (VOCAB + 32) // 32), -1, np.int32)
    late = DrawEdits(np.array([4, 4, 4], np.int32), bits, offsets=np.array([0, 1, 2], np.int32))
    assert processors.add_to(late, 1.0).offsets.tolist() == [0, 1, 2]
    request = Request("r", [1], SamplingParams(logits_processors=[watermark]), max_length=9)
    processors.open([request])
    request.row = 2
    processors.plan([request])
    both = processors.add_to(late, 1.0)
    assert both.rows.tolist() == [4, 4, 4, 2] and both.offsets.tolist() == [0, 1, 2, 0] and len(both.bits) == 4
