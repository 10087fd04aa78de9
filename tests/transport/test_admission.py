"""Exceptions while the core accepts a request: refusal, internal error, or the end of the core."""

from __future__ import annotations

import pytest

from slipstream.base.errors import EngineDead, PromptTooLong
from slipstream.contracts.messages import Submit, SubmitAll
from slipstream.params.sampling import SamplingParams
from slipstream.transport.client import submit
from slipstream.transport.frames import Refused

ONE = Submit("a", [1], SamplingParams(), 0.0)
TWO = SubmitAll([ONE, Submit("b", [1], SamplingParams(), 0.0)])


class Lanes:
    """Raises what a test wants it to."""

    def __init__(self, error: Exception | None = None, disorder: Exception | None = None) -> None:
        self.error, self.disorder = error, disorder

    def submit(self, *messages: Submit) -> None:
        if self.error is not None:
            raise self.error

    def check(self) -> None:
        if self.disorder is not None:
            raise self.disorder


def test_a_user_error_refuses_all_prompts_of_its_message(caplog):
    assert submit(Lanes(), TWO) == []
    refused = submit(Lanes(PromptTooLong("long")), TWO)
    assert refused == [Refused("a", "PromptTooLong", "long"), Refused("b", "PromptTooLong", "long")]
    assert type(refused[0].error()) is PromptTooLong and not caplog.text


def test_an_internal_error_without_damage_fails_its_request_only(caplog):
    (refused,) = submit(Lanes(AssertionError("a page has no owner")), ONE)
    assert type(refused.error()) is RuntimeError
    assert "AssertionError: a page has no owner" in caplog.text


def test_an_internal_error_that_breaks_an_invariant_ends_the_core(caplog):
    with pytest.raises(EngineDead, match="engine core .2 in the queue, 3 waiting.*KeyError: 'row'"):
        submit(Lanes(KeyError("row"), AssertionError("2 in the queue, 3 waiting")), ONE)
    assert "KeyError" in caplog.text


def test_a_dead_core_refuses_nothing():
    with pytest.raises(EngineDead):
        submit(Lanes(EngineDead("gone")), ONE)
