"""The server's log: text or JSON, one event per line."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest

from slipstream.base import log
from slipstream.base.log import FORMAT, LEVEL, pass_on_log, progress, set_up_child_log, set_up_log


def test_json_lines_have_the_extra_fields_and_the_exception(capsys):
    set_up_log("info", "json")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("slipstream.http").exception("it failed", extra={"request_id": "a", "client": "1.2.3.4:5"})
    said = json.loads(capsys.readouterr().err)
    assert (said["level"], said["message"], said["request_id"], said["client"]) == (
        "error", "it failed", "a", "1.2.3.4:5",
    )  # fmt: skip
    assert "ValueError: broken" in said["exception"] and said["time"].endswith("Z")


def test_warnings_of_other_packages_are_json_too(capsys):
    set_up_log("warning", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old ways", stacklevel=1)
    assert "old ways" in json.loads(capsys.readouterr().err)["message"]


def test_an_uncaught_exception_is_json_too(capsys):
    set_up_log("warning", "json")
    try:
        raise ValueError("broken")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert "ValueError: broken" in first["exception"] and "ZeroDivisionError" in second["exception"]
    assert first["level"] == second["level"] == "critical"


@pytest.mark.parametrize(("level", "shown"), [("error", 1), ("warning", 2), ("info", 3), ("debug", 4)])
def test_levels(capsys, level, shown):
    set_up_log(level)
    log = logging.getLogger("slipstream.http")
    for say in (log.error, log.warning, log.info, log.debug):
        say("a line")
    assert len(capsys.readouterr().err.splitlines()) == shown


def test_a_child_logs_as_its_parent_does(capsys, monkeypatch):
    monkeypatch.setenv(LEVEL, "")
    monkeypatch.setenv(FORMAT, "")
    set_up_child_log()
    logging.getLogger("slipstream.core").info("not shown")
    pass_on_log("debug", "json")
    set_up_child_log()
    logging.getLogger("slipstream.core").debug("shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "shown"


@pytest.fixture
def clock(monkeypatch):
    """The time, in seconds, for `progress`."""
    seconds = [100.0]
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(capsys, clock):
    with progress(40, "prompts") as advance:
        for _ in range(40):
            clock[0] += 3
            advance(30)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "slipstream: 4 of 40 prompts after 12 s, 10 tok/s, about 108 s left"
    assert lines[-1] == "slipstream: 40 of 40 prompts after 120 s, 10 tok/s" and len(lines) == 10
    assert "\x1b" not in "".join(lines)
    with progress(3, "tensors", rate="") as advance:
        for _ in range(2):
            clock[0] += 10
            advance(0)
    assert capsys.readouterr().err.splitlines()[0] == "slipstream: 1 of 3 tensors after 10 s, about 20 s left"


def test_short_calls_write_no_progress(capsys, clock):
    for shown, seconds in ((True, 1.0), (False, 100.0)):
        with progress(9, "prompts", shown) as advance:
            for _ in range(9):
                clock[0] += seconds
                advance(30)
    assert capsys.readouterr().err == ""


class Stderr(io.StringIO):
    """Of a pipe whose reader has left."""

    def flush(self):
        raise BrokenPipeError


@pytest.mark.parametrize("stderr", [None, io.StringIO(), Stderr()], ids=["none", "closed", "broken"])
def test_progress_that_cannot_be_written_ends_no_call(monkeypatch, clock, stderr):
    if type(stderr) is io.StringIO:
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress(2, "prompts") as advance:
        for _ in range(2):
            clock[0] += 50
            advance(1)
    assert type(stderr) is not Stderr or "1 of 2 prompts" in stderr.getvalue()
