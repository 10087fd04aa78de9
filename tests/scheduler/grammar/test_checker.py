"""The child process that checks grammars: it finds llguidance wherever this process found it, or says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from llguidance import LLMatcher

from child import child_env
from letter_tokenizer import TOKENIZER, VOCAB
from patience import PATIENCE
from slipstream.base.processes import LimitedChild, LimitPassed
from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar import check_child
from slipstream.scheduler.grammar.check_child import new_checker
from slipstream.scheduler.grammar.grammars import Grammars

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


def _chain(length: int, kind: str = "array") -> StructuredOutputsParams:
    """A schema whose parts refer to one another."""

    def to(number: int) -> dict[str, object]:
        ref = {"$ref": f"#/$defs/d{number}"}
        return {"type": "object", "properties": {"x": ref}} if kind == "object" else {"type": "array", "items": ref}

    parts = {f"d{number}": to(number + 1) for number in range(length)}
    return StructuredOutputsParams(json={**to(0), "$defs": {**parts, f"d{length}": {"type": "string"}}})


def _compile_chains() -> None:
    """In a process of its own: writes what becomes of a chain that is as long as possible, and of a longer one."""
    grammars = Grammars(lambda: TOKENIZER, VOCAB)
    for length in (1000, 2000):
        sys.stdout.write(f"{grammars.compile(_chain(length)).exception(PATIENCE)}\n")
    grammars.close()


def test_a_chain_of_references_that_is_too_long_ends_no_engine():
    """The check has less stack than the thread that compiles, also where `ulimit -s unlimited` gives threads 2 MiB."""
    script = f"ulimit -s unlimited 2>/dev/null; exec {sys.executable} -c '{_SCRIPT}'"
    env = child_env(str(Path(__file__).parent))
    ended = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, "")
    compiled, refused = ended.stdout.splitlines()
    assert compiled == "None" and "more than 8 MiB of stack: it is nested too deeply" in refused


_SCRIPT = "from test_checker import _compile_chains; _compile_chains()"


@pytest.mark.parametrize("kind", ["array", "object"])
def test_a_long_chain_of_references_compiles(kind):
    grammars = Grammars(lambda: TOKENIZER, VOCAB)
    try:
        for length in (90, 300, 900):
            assert grammars.compile(_chain(length, kind)).result(PATIENCE)
    finally:
        grammars.close()


@pytest.mark.parametrize("grammar", ["start: {}\n", "root ::= {}\n"])  # Lark's and llama.cpp's syntax
def test_a_grammar_of_many_parentheses_is_refused_by_that(grammar):
    grammars = Grammars(lambda: TOKENIZER, VOCAB)
    deep = StructuredOutputsParams(grammar=grammar.format("(" * 2000 + '"a"' + ")" * 2000))
    try:
        error = str(grammars.compile(deep).exception(PATIENCE))
        assert "too deeply nested" in error or "too many parentheses" in error
    finally:
        grammars.close()


def test_a_child_that_does_not_start_is_an_error_of_its_own():
    child = LimitedChild("slipstream.missing", max_seconds=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="`.* -m slipstream.missing` may say why"):
            child.call(b"")
