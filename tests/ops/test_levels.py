"""The C kernels of lower levels of a wheel, which other processors need, against those in use on this processor.

The kernels in use are compared with the references elsewhere. Levels for x86-64 are also read by a cross compiler, so
that an error in a header shows on a machine that cannot run it.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from emulated_library import COMPILER
from native_runs import RUNS
from repeats import slow
from slipstream.ops.platform import native
from slipstream.ops.platform.prebuilt import INCLUDES, LEVELS, Level, processor_features, usable_levels


def _levels() -> list[Any]:
    """One that most processors have; the others run with --slow."""
    levels = LEVELS.get(platform.machine(), ())
    return [level if level.name in ("avx2", "dotprod") else slow(level) for level in levels]


@pytest.fixture(scope="module", params=_levels(), ids=lambda level: level.name)
def library(request, native_kernels, tmp_path_factory) -> ctypes.CDLL:
    level: Level = request.param
    missing = level.needs - processor_features()
    if missing:
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    if level == usable_levels(platform.machine(), processor_features())[0]:
        pytest.skip("the kernels in use are of this level")
    # results do not depend on the optimisation (tests/ops/test_native_bits.py), and this compiles sooner
    flags = ["-O1" if flag == "-O3" else flag for flag in native._flags() if flag != "-march=native"]
    target = tmp_path_factory.mktemp("level") / "all.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_flags", lambda: (*flags, *level.flags))
        native._compile(target, 0)
    return native._load(target)


@pytest.mark.parametrize("run", RUNS)
def test_lower_levels_give_what_the_kernels_in_use_give(
    run: Callable[[], list[torch.Tensor]], library: ctypes.CDLL, monkeypatch
) -> None:
    expected = run()
    monkeypatch.setattr(native, "library", lambda: library)
    for found, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("level", LEVELS["x86_64"], ids=lambda level: level.name)
def test_headers_of_every_x86_level_have_no_errors(level: Level) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed")
    sources = [source for source in native._sources() if source.parent.name in ("linear", "low_bit")]
    flags = ("-std=gnu11", "-fopenmp", "-Wall", "-Werror", "-fsyntax-only")
    subprocess.run([COMPILER, *flags, *INCLUDES, *level.flags, *sources], check=True)
