"""What all tests share."""

import importlib.metadata
import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.config.locate import LocatedModel, locate
from slipstream.errors import ModelNotFound
from slipstream.log import FORMAT, LEVEL

# Tests run on the CPU, GPU or not, in other processes too; those marked `cuda` name their device.
os.environ["SLIPSTREAM_DEVICE"] = "cpu"

# How a child ended is lost where SIGCHLD is ignored, which a process inherits.
signal.signal(signal.SIGCHLD, signal.SIG_DFL)

# Kernels run in Triton's interpreter where there is no GPU. It must be chosen before anyone imports triton.
if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _version(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return (0,)


def _mend_interpreter() -> None:
    """Triton 3.6 turns arrays of one element into indices in a way that numpy 2.4 refuses; 3.7 does not."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


if os.environ.get("TRITON_INTERPRET") == "1" and _version("triton") == (3, 6):
    _mend_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` are skipped where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def default_model() -> LocatedModel:
    """The embedded model; the test is skipped where its package is missing."""
    try:
        return locate(None)
    except ModelNotFound as missing:
        pytest.skip(str(missing))


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's SIGINT handler during the test, and a check that the test left it in place.

    A process started in the background (`scripts/test &`, cron, some CI runners) begins with SIGINT ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the test left another SIGINT handler"
    finally:
        signal.signal(signal.SIGINT, before)


def _loggers() -> list[logging.Logger]:
    """The root logger and the loggers of this package."""
    known = list(logging.root.manager.loggerDict.items())
    ours = [each for name, each in known if name.partition(".")[0] == "slipstream" and isinstance(each, logging.Logger)]
    return [logging.root, *ours]


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restores the state of logging after each test.

    Commands and servers configure logging for their whole process. Without this fixture the tests that run later in the
    same process have the level and the handlers of an earlier test, and `caplog` gets no records.
    """
    before = {each: (each.level, each.handlers[:], each.filters[:], each.propagate) for each in _loggers()}
    variables = {name: os.environ.get(name) for name in (LEVEL, FORMAT)}
    hooks = sys.excepthook, threading.excepthook
    yield
    sys.excepthook, threading.excepthook = hooks
    for each in _loggers():
        level, handlers, filters, propagate = before.get(each, (logging.NOTSET, [], [], True))
        each.setLevel(level)  # which also clears the loggers' caches of enabled levels
        each.handlers[:], each.filters[:] = handlers, filters
        each.propagate, each.disabled = propagate, False
    logging.disable(logging.NOTSET)
    logging.captureWarnings(False)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
