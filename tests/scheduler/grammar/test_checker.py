"""The child process that checks grammars: it finds llguidance wherever this process found it, or says so."""

from __future__ import annotations

import sys

import pytest
from llguidance import LLMatcher

from slipstream.scheduler.grammar import check_child
from slipstream.scheduler.grammar.checker import GrammarChecker, GrammarTooComplex

GRAMMAR = LLMatcher.grammar_from_regex("[0-9]+")


def test_the_child_needs_no_site_packages(monkeypatch):
    """llguidance may be on PYTHONPATH only. The interpreter below a virtual environment has none of its packages."""
    monkeypatch.setattr(sys, "executable", sys._base_executable)
    checker = GrammarChecker()
    try:
        assert checker.check(GRAMMAR) == ""
        assert checker.check("{") != ""
    finally:
        checker.close()


def test_a_grammar_whose_matcher_takes_minutes_is_too_complex():
    """It is valid; the lexer has a state for each remainder, and all are made with the matcher."""
    checker = GrammarChecker(max_seconds=0.5)
    schema = {"type": "integer", "multipleOf": 123_456_789}
    try:
        with pytest.raises(GrammarTooComplex):
            checker.check(LLMatcher.grammar_from_json_schema(schema))
        assert checker.check(GRAMMAR) == ""
    finally:
        checker.close()


def test_a_child_that_does_not_start_is_an_error_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(check_child, "__file__", str(tmp_path / "missing.py"))
    checker = GrammarChecker()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="did not start"):
            checker.check(GRAMMAR)
