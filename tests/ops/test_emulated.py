"""The C kernels for x86-64 processors with AVX2, run by an emulator, against those of this machine.

qemu has neither AVX-VNNI nor AVX-512. The kernels of this machine are compared with the references elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from emulated_library import COMPILER, EMULATOR, EmulatedLibrary, can_emulate
from native_runs import RUNS


@pytest.fixture(scope="module")
def emulated(native_kernels, tmp_path_factory) -> Iterator[EmulatedLibrary]:
    if not can_emulate():
        pytest.skip(f"{COMPILER} or {EMULATOR} is not installed")
    library = EmulatedLibrary("avx2", tmp_path_factory.mktemp("emulated"))
    yield library
    library.close()


@pytest.mark.parametrize("run", RUNS)
def test_emulated_kernels_give_what_those_of_this_machine_give(
    run: Callable[[], list[torch.Tensor]], emulated: EmulatedLibrary, monkeypatch
) -> None:
    expected = run()
    emulated.install(monkeypatch)
    for found, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, wanted)
