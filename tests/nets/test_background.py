"""Tests that send signals pass in a run that was started in the background, where signals are ignored."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = ["base/test_interrupts.py", "transport/test_inline.py", "serve/test_cli_chat.py"]
RAISED = re.compile(r"(raise_signal\(|getpid\(\), )signal\.SIGINT")


def start_as_in_the_background() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    os.setsid()  # no terminal
    os.close(0)
    os.umask(0o077)


def test_tests_that_interrupt_themselves_set_the_handler():
    """Those that are run here; that all of them ask for it is the next test."""
    environment = {name: value for name, value in os.environ.items() if name != "HOME" and "PYTEST" not in name}
    options = ["-x", "-p", "no:cacheprovider", "-k", "interrupt"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(TESTS / file) for file in FILES)],
        cwd=TESTS.parent,
        env=environment | {"LC_ALL": "C", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        encoding="utf-8",
        preexec_fn=start_as_in_the_background,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_every_file_that_interrupts_its_own_process_asks_for_the_handler():
    sources = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}
    raising = [path for path, source in sources.items() if RAISED.search(source)]
    assert len(raising) > 3
    assert not [path.name for path in raising if 'usefixtures("interrupts")' not in sources[path]]
