"""The bits of the C kernels follow from their source alone, not from what the optimizer makes of it.

A compiler may contract a product and a sum to a fused multiply-add, or leave them apart, and it decides anew for every
copy of a loop. With such a choice left open, a token could get other bits alone than in a batch (law 7), on processors
and with compilers that we do not have. So code that is not optimized must give the same bits as code that is.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable

import pytest
import torch

from native_runs import RUNS
from slipstream.ops.platform import native
from slipstream.ops.platform.prebuilt import INCLUDES


@pytest.fixture(scope="module")
def unoptimized(tmp_path_factory) -> ctypes.CDLL:
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    made, compiler = tmp_path_factory.mktemp("native") / "unoptimized.so", native._compiler()
    assert compiler is not None
    flags = ["-O0" if flag == "-O3" else flag for flag in native._flags()]
    assert "-O0" in flags
    subprocess.run([compiler, *flags, *INCLUDES, "-shared", *native._sources(), "-o", str(made)], check=True)
    return native._load(made)


@pytest.mark.parametrize("run", RUNS)
def test_unoptimized_code_gives_the_same_bits(run: Callable[[], list[torch.Tensor]], unoptimized, monkeypatch) -> None:
    found = run()
    monkeypatch.setattr(native, "library", lambda: unoptimized)
    for number, (mine, plain) in enumerate(zip(found, run(), strict=True)):
        assert mine.isfinite().all() and mine.equal(plain), f"result {number}: {(mine - plain).abs().max()} apart"
