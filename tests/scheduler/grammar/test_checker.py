"""The child process that checks grammars: it finds llguidance wherever this process found it, or says so."""

from __future__ import annotations

import sys

import pytest
from llguidance import LLMatcher

from slipstream.base.processes import LimitedChild, LimitPassed
from slipstream.scheduler.grammar import check_child
from slipstream.scheduler.grammar.check_child import new_checker

GRAMMAR = LLMatcher.grammar_from_regex("[0-9]+").encode()


def test_the_child_needs_no_site_packages(monkeypatch):
    """llguidance may be on PYTHONPATH only. The interpreter below a virtual environment has none of its packages."""
    monkeypatch.setattr(sys, "executable", sys._base_executable)
    checker = new_checker()
    try:
        assert checker.call(GRAMMAR) == b""
        assert checker.call(b"{") != b""
    finally:
        checker.close()


def test_a_grammar_whose_matcher_takes_minutes_is_too_complex(monkeypatch):
    """It is valid; the lexer has a state for each remainder, and all are made with the matcher."""
    monkeypatch.setattr(check_child, "MAX_SECONDS", 0.5)
    checker = new_checker()
    schema = {"type": "integer", "multipleOf": 123_456_789}
    try:
        with pytest.raises(LimitPassed, match=r"^more than 0\.5 s or 1024 MiB$"):
            checker.call(LLMatcher.grammar_from_json_schema(schema).encode())
        assert checker.call(GRAMMAR) == b""
    finally:
        checker.close()


def test_a_child_that_does_not_start_is_an_error_of_its_own():
    child = LimitedChild("slipstream.missing", max_seconds=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="`.* -m slipstream.missing` may say why"):
            child.call(b"")
