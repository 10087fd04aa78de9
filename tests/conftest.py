"""Fixtures and settings of all tests."""

import gc
import importlib.metadata
import importlib.util
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from repeats import mark_repeats
from slipstream.base.errors import ModelNotFound
from slipstream.base.log import FORMAT, LEVEL
from slipstream.checkpoint.locate import LocatedModel, locate
from slipstream.device import device

# Neither the time of an example nor that of drawing some examples is a result: both are the machine's.
hypothesis.settings.register_profile(
    "slow machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("slow machine")

# Collecting imports thousands of modules, of which nothing is garbage: 2.3 of 14 s would be spent on collections.
gc.disable()

# Tests run on the CPU even if there is a GPU, also in child processes; tests marked `cuda` name their device.
os.environ["SLIPSTREAM_DEVICE"] = "cpu"

# An engine takes one thread if a test names no number: those of several workers would wait for each other's cores, and
# wait in loops.
device.num_cores = lambda: 1

# The exit status of a child is lost if SIGCHLD is ignored, and a process inherits that setting.
signal.signal(signal.SIGCHLD, signal.SIG_DFL)

# Without a GPU, kernels run in Triton's interpreter. The variable must be set before the first import of triton.
if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _version(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return (0,)


def _patch_interpreter() -> None:
    """Patches the interpreter of Triton 3.6: it converts one-element arrays to indices in a way that numpy 2.4
    rejects."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


if os.environ.get("TRITON_INTERPRET") == "1":
    if _version("triton") == (3, 6):
        _patch_interpreter()
    from fast_interpreter import speed_up_interpreter

    speed_up_interpreter()


def pytest_collection_finish() -> None:
    # The modules stay: a full collection that traverses them takes 0.5 s, 4 % of the whole suite.
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow; -m slow runs them alone")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Ray's tests first: they wait, for up to a minute, and near the end nothing else would run meanwhile. Leaves out
    tests marked `slow`, and skips tests marked `cuda` if there is no GPU."""
    items.sort(key=lambda item: item.path.name != "test_ray_replicas.py")
    mark_repeats(items)
    if not config.option.slow and "slow" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


_started = 0.0  # CPU seconds of this process when the present test began


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _started
    _started = _cpu_seconds()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """The XML of a run has the CPU seconds of each test, with its fixtures and the child processes that it waited for:
    unlike the seconds on the clock, they hardly depend on what else runs on the machine."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu", f"{_cpu_seconds() - _started:.3f}"))


@pytest.fixture(scope="session")
def default_model() -> LocatedModel:
    """The embedded model; skips the test if its package is not installed."""
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


def _attach_to_the_root_logger_only() -> None:
    """pytest attaches its two handlers in each phase of a test to all loggers that do not propagate: with torch these
    are 56 of 500, and that took half of the time of a small test. Ours propagate when a test begins."""
    from _pytest.logging import catching_logs

    if not hasattr(catching_logs, "attached_loggers"):  # before pytest 9.1
        return

    def enter(self: Any) -> Any:
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = logging.root.level
            logging.root.setLevel(min(self.orig_level, self.level))
        logging.root.addHandler(self.handler)
        self.attached_loggers.append(logging.root)
        return self.handler

    catching_logs.__enter__ = enter  # type: ignore[method-assign]


_attach_to_the_root_logger_only()
_our_names: tuple[int, list[str]] = 0, []  # number of known loggers when the names were listed


def _loggers() -> list[logging.Logger]:
    """The root logger and the loggers of this package."""
    global _our_names
    known = logging.root.manager.loggerDict
    if _our_names[0] != len(known):
        _our_names = len(known), [name for name in known if name.partition(".")[0] == "slipstream"]
    return [logging.root, *(each for name in _our_names[1] if isinstance(each := known[name], logging.Logger))]


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
    is_changed = logging.root.manager.disable != logging.NOTSET
    for each in _loggers():
        level, handlers, filters, propagate = before.get(each, (logging.NOTSET, [], [], True))
        is_changed = is_changed or each.level != level or each.disabled
        each.level = level
        each.handlers[:], each.filters[:] = handlers, filters
        each.propagate, each.disabled = propagate, False
    if is_changed:
        logging.disable(logging.NOTSET)  # clears the caches of enabled levels of all loggers, which takes long
    logging.captureWarnings(False)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
