"""Fixtures that all tests share."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from child import child_env

TESTS = """
import logging, os, sys, threading, warnings
import pytest
from slipstream.base.log import pass_on_log, set_up_log

log, new = logging.getLogger("slipstream.of_a_test"), "slipstream.made_by_a_test"

def change():
    pass_on_log("error", "json")
    set_up_log("error", "json")

def restrict():
    logging.disable(logging.ERROR)
    logging.getLogger("slipstream").addFilter(lambda record: False)
    logging.getLogger("slipstream").propagate = False
    log.disabled = True
    log.addHandler(logging.NullHandler())
    log.addFilter(lambda record: False)
    logging.getLogger(new).setLevel("CRITICAL")

@pytest.mark.parametrize("configure", [change, restrict])
def test_first(configure):
    configure()

def test_second(caplog):
    log.warning("one")
    logging.getLogger(new).warning("two")
    assert [record.getMessage() for record in caplog.records] == ["one", "two"]
    assert not log.handlers and not [each for each in logging.root.handlers if type(each) is logging.StreamHandler]
    assert sys.excepthook is sys.__excepthook__ and "slipstream" not in threading.excepthook.__module__
    assert "SLIPSTREAM_LOG_LEVEL" not in os.environ and "SLIPSTREAM_LOG_FORMAT" not in os.environ

def test_warnings_are_captured_anew(capsys):
    set_up_log("error", "json")
    warnings.warn("three")
    assert '"message":"' in capsys.readouterr().err

@pytest.mark.slow
def test_that_is_slow():
    assert False

@pytest.mark.every_second("one", "other")
@pytest.mark.parametrize("one", ["a", "b"])
@pytest.mark.parametrize("other", [1, 2])
def test_every_second_pair_is_slow(one, other):
    assert one + str(other) in ("a1", "b2")
"""


def test_logging_that_a_test_configures_does_not_reach_the_next_test(tmp_path):
    """In the same run, since it takes seconds: slow tests are left out, and each has its CPU seconds."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_in_order.py").write_text(TESTS, encoding="utf-8")
    env = child_env(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")  # the fixture needs none, and their imports take seconds
    for name in ("SLIPSTREAM_LOG_LEVEL", "SLIPSTREAM_LOG_FORMAT", "PYTEST_ADDOPTS"):
        env.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    command += ["--junitxml", "run.xml", "test_in_order.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and "6 passed, 3 deselected" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "run.xml").read_text(encoding="utf-8").count('<property name="cpu" value="') == 6
