"""Rows with a grammar that draw together step after step are handled together, and one by one if anything differs."""

import numpy as np
import pytest

from letter_tokenizer import END, TOKENIZER, make_constraints
from scripted_engine import scripted_core, submit
from slipstream.contracts.messages import Abort
from slipstream.params.structured import StructuredOutputsParams as Shape
from slipstream.scheduler.grammar.draws import DrawGroup

SHAPE = Shape(regex="[a-z]{20,30}")
NUM_ROWS = 6


@pytest.fixture
def core():
    core = scripted_core(1, constraints=make_constraints(NUM_ROWS + 2), num_pages=400)
    core.constraints.grammars.compile(SHAPE).result()
    if core.constraints.grammars.threads is None:
        pytest.skip("there is no C compiler")
    yield core
    core.close()


@pytest.fixture
def taken(monkeypatch):
    """Of each step whose rows are a group: whether the group took the tokens."""
    found, take = [], DrawGroup.take

    def watched(group, launched, result):
        found.append(take(group, launched, result))
        return found[-1]

    monkeypatch.setattr(DrawGroup, "take", watched)
    return found


def start(core, num_rows=NUM_ROWS, **params):
    core.submit(
        *(
            submit(f"r{row}", [3 + row, 7], structured_outputs=SHAPE, **{"max_tokens": 16} | params)
            for row in range(num_rows)
        )
    )


def run(core):
    """Returns the tokens of each request."""
    found = {}
    while core.has_requests():
        for output in core.step():
            found[output.request_id] = found.get(output.request_id, []) + output.token_ids
        core.scheduler.check()
    return found


def test_the_rows_of_a_steady_batch_are_one_group(core, taken):
    start(core)
    alone = run(core)
    assert len(taken) >= 12 and all(taken)
    taken.clear()
    core.submit(submit("plain", [9, 9], max_tokens=16))
    start(core)
    beside = run(core)
    assert len(taken) >= 12 and all(taken), "rows without a grammar draw beside the group"
    assert alone == {name: tokens for name, tokens in beside.items() if name != "plain"}


def test_a_token_that_ends_a_request_is_left_to_the_rows(core, taken):
    stop = TOKENIZER.encode("e")  # so that requests end one after another
    start(core, stop_token_ids=[*stop, END], min_tokens=4)
    ended = run(core)
    assert not all(taken) and any(taken)
    assert len({len(tokens) for tokens in ended.values()}) > 1
    for tokens in ended.values():
        assert len(tokens) == 16 or tokens[-1] in stop or tokens[-1] == END


def test_a_request_that_goes_changes_no_other(core, taken):
    start(core)
    alone = run(core)
    start(core)
    found = {}
    for _ in range(6):
        for output in core.step():
            found[output.request_id] = found.get(output.request_id, []) + output.token_ids
    core.abort(Abort("r2"))
    for name, tokens in run(core).items():
        found[name] = found.get(name, []) + tokens
    assert len(found.pop("r2")) < 16 == len(alone.pop("r2"))
    assert found == alone and any(taken)


def test_a_failed_draw_is_left_to_the_rows(core, taken):
    start(core)
    core.executor.executor.fail = lambda admission, length: admission.row == 1 and length == 8
    found = run(core)
    assert not all(taken)
    assert len(found["r1"]) < 16 and all(len(tokens) == 16 for name, tokens in found.items() if name != "r1")


def test_masks_are_recorded_with_the_tokens_before_them(core):
    """A recording computes masks again from the sources and lengths of each step."""
    seen = []
    late = core.constraints.late
    core.constraints.late = lambda: seen.append(late()) or seen[-1]
    start(core)
    run(core)
    assert len(seen) >= 16
    shared = {id(step.sources) for step in seen}
    assert len(shared) < len(seen), "steps of one group share the list"
    for step in seen:
        assert len(step.sources) == len(step.lengths) == len(step.rows)
        known = [length for source, length in zip(step.sources, step.lengths, strict=True) if source is not None]
        assert len(set(known)) <= 1 and np.all(np.array(known) >= 2)
