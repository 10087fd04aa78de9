"""The server's log: text or JSON, one event per line."""

from __future__ import annotations

import json
import logging
import sys
import threading
import warnings

import pytest

from slipstream.base.log import FORMAT, LEVEL, pass_on_log, set_up_child_log, set_up_log


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
