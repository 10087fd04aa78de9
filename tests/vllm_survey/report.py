"""A pytest plugin: writes the outcome of each case as a line of JSON to $SURVEY_REPORT, and limits its seconds."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest

LIMIT = int(os.environ.get("SURVEY_LIMIT", "120"))
_MAIN = os.getpid()


class TooLong(BaseException):
    """Not an Exception, so that no test catches it."""


def _raise(*given: Any) -> None:
    raise TooLong(f"longer than {LIMIT} s")


def pytest_configure(config: Any) -> None:
    """Tests release the memory of a GPU; without one there is none to release."""
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> Any:
    signal.signal(signal.SIGALRM, _raise)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)


def pytest_runtest_logreport(report: Any) -> None:
    if os.getpid() != _MAIN:
        # a case in a forked child: vLLM's wrapper does not catch pytest's own failures ("did not raise"), and the child
        # would run the rest of the file, forking again with an engine and its threads, while its parent waits
        sys.stdout.write(report.longreprtext)
        sys.stdout.flush()
        os._exit(1)
    failed_before = report.when != "call" and report.outcome == "passed"
    if failed_before:
        return
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "passed"  # a failure that the test itself expects, or a success
    _write(report.nodeid, outcome, str(report.longrepr or ""), report.duration)


def pytest_collectreport(report: Any) -> None:
    if report.outcome != "passed":
        _write(report.nodeid, "not collected", str(report.longrepr), 0.0)


def _write(case: str, outcome: str, text: str, seconds: float) -> None:
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E  ")]
    line = {
        "case": case,
        "outcome": outcome,
        "seconds": round(seconds, 1),
        "error": "\n".join(errors[:6] or lines[-2:]),
    }
    with open(os.environ["SURVEY_REPORT"], "a") as file:
        file.write(json.dumps(line) + "\n")
    with open(os.environ["SURVEY_REPORT"] + ".log", "a") as file:
        file.write(f"=== {case} {outcome}\n{text[-6000:]}\n")
