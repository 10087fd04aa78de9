"""Requests with a grammar, on a scripted device that draws as a hash says: their output is what the grammar allows, the
same at every depth and beside any other request."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import Future

import jsonschema_rs
import msgspec
import numpy as np
import pytest

from letter_tokenizer import END, TOKENIZER, make_constraints, oracle_matcher
from patience import PATIENCE
from repeats import seeds
from scripted_engine import scripted_core, submit, tokens_alone
from scripted_tokens import VOCAB, choose, draw
from slipstream.base.errors import InvalidParams
from slipstream.contracts.messages import Abort
from slipstream.contracts.request import FinishReason, Status
from slipstream.params.sampling import SamplingParams
from slipstream.params.structured import StructuredOutputsParams as Shape
from slipstream.scheduler.grammar import constraints as constraints_module
from slipstream.scheduler.grammar.native_matcher import GrammarCompiler
from slipstream.scheduler.grammar.session import Session

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
TAG = {
    "type": "tag",
    "begin": "<f>",
    "content": {
        "type": "or",
        "elements": [{"type": "json_schema", "json_schema": {"enum": [1, "a"]}}, {"type": "any_text"}],
    },
    "end": "</f>",
}
SHAPES = [
    Shape(json=SCHEMA, disable_any_whitespace=True),
    Shape(regex="[0-9]{2,9}"),
    Shape(choice=["yes", "no", "not known"]),
    Shape(grammar='start: "(" item ("," item)* ")"\nitem: /[a-z]{1,3}/'),
    Shape(structural_tag={"format": {"type": "sequence", "elements": [TAG, {"type": "optional", "content": TAG}]}}),
]


def with_grammar(message, stop=(END,), max_model_len=64):
    """The tokens of this prompt's samples alone, by a matcher of llguidance and the device's hash."""
    params, found = message.params, []
    for sample in range(params.n):
        matcher, tokens = oracle_matcher(params.structured_outputs), list(message.prompt_token_ids)
        most = max_model_len if params.max_tokens is None else min(max_model_len, len(tokens) + params.max_tokens)
        reason = None
        while reason is None:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            if bits[VOCAB]:  # the grammar may end here
                bits[list(stop)] = 1
            token = choose(draw(tokens, params.seed, sample), bits.__getitem__)
            tokens.append(token)
            if token in stop:
                reason = FinishReason.STOP
            elif len(tokens) >= most:
                reason = FinishReason.LENGTH
            else:
                assert matcher.consume_token(token)
                if matcher.is_stopped():
                    reason = FinishReason.STOP
        found.append((tokens[len(message.prompt_token_ids) :], reason))
    return found


def run(core, limit=3000):
    """Steps until nothing is left. Returns the tokens and finish reasons by request and sample."""
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

    def make(depth, **options):
        cores.append(scripted_core(depth, constraints=make_constraints(options.get("max_num_seqs", 8)), **options))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


def prompts(shapes, **params):
    return [
        submit(
            f"r{i}", [3 + i, 7, 9 + i], structured_outputs=shape, stop_token_ids=[END], **{"max_tokens": 40} | params
        )
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_pages", [200, 24], ids=["room", "preempted"])
def test_output_is_what_the_grammar_alone_allows(core_of, depth, num_pages):
    core = core_of(depth, num_pages=num_pages)
    messages = prompts(SHAPES, n=2)
    plain = [submit(f"p{i}", [50 + i, 3], max_tokens=30) for i in range(3)]
    core.submit(*messages, *plain)
    found = run(core)
    for message in messages:
        for sample, wanted in enumerate(with_grammar(message)):
            assert found[message.request_id, sample][:2] == wanted
    for message in plain:
        assert found[message.request_id, 0][:2] == tokens_alone(message, 0)
    assert (core.scheduler.num_preemptions > 0) == (num_pages == 24)
    text = TOKENIZER.decode(found["r0", 0][0])
    jsonschema_rs.validate(SCHEMA, json.loads(text))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_forced_tokens_are_one_chunk_and_the_same_tokens_as_without_the_shortcut(core_of, depth):
    shape = Shape(grammar='start: "abcdefghijklmnopq" /[0-9]/ "rstuvwxyz" /[0-9]/')
    (message,) = prompts([shape])
    core = core_of(depth)
    core.submit(message)
    appended = run(core)
    assert core.num_steps < 12 < len(appended["r0", 0][0])
    (reported,) = prompts([shape], logprobs=0)
    other = core_of(depth)
    other.submit(reported)
    drawn = run(other)
    assert other.num_steps >= len(drawn["r0", 0][0])
    assert appended["r0", 0][:2] == drawn["r0", 0][:2] == with_grammar(message)[0]


@pytest.mark.parametrize("then", ["step", "drain", "abort", "submit"])
def test_between_two_steps_a_head_may_wait_for_masks(core_of, then):
    core, messages = core_of(1, num_pages=200), prompts(SHAPES)
    for shape in SHAPES:
        core.constraints.grammars.compile(shape).result()  # so that the steps are the same in every run
    core.submit(*messages)
    found, num_waited = {}, 0
    while core.has_requests():
        outputs = core.step()
        if core.has_launched and not core.in_flight:
            num_waited += 1
            if then == "drain":
                outputs += core.drain()
                assert not core.has_launched
            if num_waited == 2 and then == "abort":
                core.abort(Abort("r0"))
            if num_waited == 2 and then == "submit":
                messages += [submit("late", [4, 5], structured_outputs=SHAPES[1], stop_token_ids=[END], max_tokens=40)]
                core.submit(messages[-1])
        for output in outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
        core.scheduler.check()
    assert num_waited >= 2
    for message in messages:
        wanted = with_grammar(message)[0][0]
        if then == "abort" and message.request_id == "r0":
            assert found["r0"] == wanted[: len(found["r0"])] and len(found["r0"]) < len(wanted)
        else:
            assert found[message.request_id] == wanted


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_token_or_the_length_ends_inside_forced_tokens(core_of, depth):
    shape = Shape(grammar='start: /[0-9]/ "abcdefghij" /[0-9]/')
    letter = TOKENIZER.encode("e")[0]
    for stop, most, wanted, reason in (([letter], 30, 6, FinishReason.STOP), ([END], 8, 8, FinishReason.LENGTH)):
        core = core_of(depth)
        core.submit(submit("r", [5, 6], structured_outputs=shape, stop_token_ids=stop, max_tokens=most))
        tokens, ended, _ = run(core)["r", 0]
        assert (len(tokens), ended) == (wanted, reason)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_end_of_the_grammar_ends_the_request_without_a_stop_token(core_of, depth):
    core = core_of(depth)
    shapes = [Shape(choice=["ab"]), Shape(regex="[a-c]{3}")]
    core.submit(*[submit(f"r{i}", [5, i], structured_outputs=shape, max_tokens=None) for i, shape in enumerate(shapes)])
    core.submit(submit("least", [9], structured_outputs=shapes[0], min_tokens=9, max_tokens=20, stop_token_ids=[END]))
    found = run(core)
    ended = {name: (len(tokens), reason) for (name, _), (tokens, reason, _) in found.items()}
    assert ended == dict(r0=(2, FinishReason.STOP), r1=(3, FinishReason.STOP), least=(2, FinishReason.STOP))


def test_stop_tokens_are_allowed_only_where_the_grammar_may_end(core_of):
    """Every token is a stop token, so the first that is drawn beyond the grammar ends the request."""
    core = core_of(1)
    shape = Shape(regex="[0-9]{6,}")
    core.submit(submit("r", [5, 6], structured_outputs=shape, stop_token_ids=list(range(60, VOCAB)), max_tokens=50))
    tokens, reason, _ = run(core)["r", 0]
    assert reason is FinishReason.STOP and len(tokens) > 6 and tokens[-1] >= 60
    assert TOKENIZER.decode(tokens[:-1]).isdigit()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_without_an_allowed_token_fails_alone(core_of, depth, monkeypatch):
    core = core_of(depth)
    messages = prompts(SHAPES[1:3])
    core.submit(*messages, submit("p", [50, 3], max_tokens=10))
    late, forbidden = core.constraints.late, []

    def forbid_all():
        drawing = [request for request, *_ in core.constraints._awaited]
        found = late()
        for index, request in enumerate(drawing):
            if not forbidden and request.num_output == 2 and request.status is Status.RUNNING:
                forbidden.append(request.id)
                found.bits[index] = 0
                found.entries[index] = found.targets[index] = index  # none that the device has
        return found

    monkeypatch.setattr(core.constraints, "late", forbid_all)
    found = run(core)
    failed = [name for name, (_, reason, _) in found.items() if reason is FinishReason.ERROR]
    assert [name for name, _ in failed] == forbidden
    for message in messages:
        if (name := (message.request_id, 0)) not in failed:
            assert found[name][:2] == with_grammar(message)[0]


def test_a_wrong_grammar_refuses_its_request_and_no_other(core_of):
    core = core_of(1)
    good, *_ = prompts(SHAPES[1:2])
    core.submit(submit("bad", [1], n=3, structured_outputs=Shape(regex="(")), good)
    found = run(core)
    assert all(
        found["bad", sample][1] is FinishReason.ERROR and "regex" in found["bad", sample][2] for sample in range(3)
    )
    assert found["r0", 0][:2] == with_grammar(good)[0]
    with pytest.raises(InvalidParams, match="unclosed group"):  # known by now
        core.submit(submit("bad", [1], structured_outputs=Shape(regex="(")))
    assert not core.scheduler.num_live and not core.constraints.num_live


def test_a_request_waits_for_its_grammar_and_the_others_do_not(core_of, monkeypatch):
    core = core_of(1)
    compiled, compile_now = threading.Event(), GrammarCompiler.compile
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *args: compiled.wait(PATIENCE) and compile_now(*args))
    (message,) = prompts(SHAPES[1:2], n=2)
    core.submit(message, submit("p", [50, 3], max_tokens=10))
    outputs = [output for _ in range(30) for output in core.step()]
    assert {output.request_id for output in outputs} == {"p"} and outputs[-1].finish_reason is FinishReason.LENGTH
    core.abort(Abort("r0", 0))  # the sample that would compute the prompt
    compiled.set()
    found = run(core)
    assert list(found) == [("r0", 1)] and found["r0", 1][:2] == with_grammar(message)[1]


def test_an_aborted_request_leaves_nothing(core_of):
    core = core_of(2)
    core.submit(*prompts(SHAPES, n=2))
    while core.num_steps < 6:
        core.step()
    for i in range(len(SHAPES)):
        core.abort(Abort(f"r{i}"))
    run(core)
    core.constraints.close()  # background threads have ended
    assert core.scheduler.plan() is None
    assert core.constraints.num_live == 0 and not core.constraints.drawing and not core.constraints.is_waiting


def test_a_request_waits_in_the_name_of_its_caller_until_its_last_sample_is_aborted(core_of, monkeypatch):
    core, may_end = core_of(1), threading.Event()
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: may_end.wait(PATIENCE))
    (message,) = prompts(SHAPES[:1], n=2)
    core.submit(msgspec.structs.replace(message, caller="key"))
    compilation = core.constraints.grammars.compile(message.params.structured_outputs, "other")
    core.constraints.grammars.leave(compilation, "other")
    for sample in range(2):
        assert compilation.waiting == {"key": 1} and core.constraints.is_waiting
        core.abort(Abort("r0", sample))
    assert not compilation.waiting and not core.constraints.is_waiting and core.scheduler.plan() is None
    may_end.set()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_slow_masks_let_their_request_sit_out_and_change_no_token(core_of, depth, monkeypatch):
    """Every mask takes longer than the budget: each request waits for a background thread before it is planned."""
    core = core_of(depth, num_pages=40)
    core.constraints.min_budget = 0.0
    messages = prompts(SHAPES)
    core.submit(*messages, submit("p", [50, 3], max_tokens=40))
    rests, held = [], core.constraints._held
    fill = held.fill
    monkeypatch.setattr(held, "fill", lambda *given: rests.append(given) or fill(*given))
    found = run(core)
    assert rests
    for message in messages:
        assert found[message.request_id, 0][:2] == with_grammar(message)[0]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_session_is_not_touched_while_a_thread_fills_its_mask(core_of, depth, monkeypatch):
    """llguidance raises an error if two threads use one matcher. Here jobs last until the next plan."""
    core = core_of(depth)
    core.constraints.min_budget = 0.0
    constraints, jobs = core.constraints, []
    held, wake = constraints._held, constraints.wake
    fill = held.fill

    def start_later(request, session, budget):
        job = Future()
        monkeypatch.setattr(constraints.grammars, "run", lambda work: jobs.append((session, work, job)) or job)
        fill(request, session, budget)
        session.real, session.matcher = session.matcher, None

    def finish_and_wake():
        while jobs:
            session, work, job = jobs.pop()
            session.matcher = session.real
            work()
            job.set_result(None)
        return wake()

    class Roomy(Session):  # with room for the matcher while it is away
        pass

    monkeypatch.setattr(constraints_module, "Session", Roomy)
    monkeypatch.setattr(held, "fill", start_later)
    monkeypatch.setattr(constraints, "wake", finish_and_wake)
    messages = prompts(SHAPES)
    core.submit(*messages)
    found = run(core)
    for message in messages:
        assert found[message.request_id, 0][:2] == with_grammar(message)[0]


@pytest.mark.parametrize("seed", seeds(12, kept=6))
def test_any_mixture_gives_each_request_its_own_output(core_of, seed):
    dice = random.Random(seed)
    core = core_of(dice.randrange(3), num_pages=dice.choice([24, 32, 100]), max_num_batched_tokens=dice.choice([9, 64]))
    messages, aborted = [], set()
    for i in range(14):
        shape = dice.choice([None, *SHAPES])
        prompt = [dice.randrange(VOCAB) for _ in range(dice.randrange(1, 20))]
        params = dict(n=dice.choice([1, 1, 3]), max_tokens=dice.randrange(1, 30))
        if shape is not None:
            params |= dict(structured_outputs=shape, stop_token_ids=[END])
            params |= dice.choice([{}, {"logprobs": 1}, {"min_tokens": 1}])
        messages.append(submit(f"m{i}", prompt, **params))
    waiting, found = list(messages), {}
    while waiting or core.has_requests():
        if waiting and dice.random() < 0.3:
            core.submit(waiting.pop())
        if dice.random() < 0.02 and messages:
            name = dice.choice(messages).request_id
            if core.scheduler.serves(name):
                core.abort(Abort(name))
                aborted.add(name)
        for output in core.step():
            tokens, _ = found.get((output.request_id, output.sample), ([], None))
            found[output.request_id, output.sample] = tokens + output.token_ids, output.finish_reason
        core.scheduler.check()
    for message in messages:
        if message.request_id in aborted:
            continue
        for sample in range(message.params.n):
            if message.params.structured_outputs is None:
                wanted = tokens_alone(message, sample)
            else:
                wanted = with_grammar(message)[sample]
                if message.params.min_tokens and wanted[0] == [END]:
                    continue
            assert found[message.request_id, sample] == wanted, (message, sample)


def test_unconstrained_engines_do_no_work_for_grammars(core_of):
    core = core_of(1)
    core.submit(submit("p", [50, 3], max_tokens=20))
    run(core)
    assert core.constraints._pool is None and core.constraints.grammars._pool is None


def test_parameters_without_an_engine_for_them_are_refused():
    with pytest.raises(Exception, match="no structured output"):
        scripted_core(0).submit(submit("r", [1], structured_outputs=SHAPES[0]))


def test_shapes_may_be_given_as_objects():
    params = SamplingParams(structured_outputs={"regex": "a+"})
    assert params.structured_outputs == Shape(regex="a+")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [8, 9, 12, 20])
def test_forced_tokens_are_divided_by_the_budget_of_a_step(core_of, depth, budget):
    """A chunk of forced tokens takes several steps if the other rows leave it few tokens."""
    shape = Shape(grammar='start: "abcdefghijklmnopq" /[0-9]/ "rstuvwxyz" /[0-9]/')
    core = core_of(depth, max_num_batched_tokens=budget, max_num_seqs=8, num_pages=400)
    messages = prompts([shape, SHAPES[0]] * 8)
    core.submit(*messages)
    found = run(core)
    for message in messages:
        assert found[message.request_id, 0][:2] == with_grammar(message)[0]
