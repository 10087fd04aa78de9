"""Which dtype of weights is faster is measured once per machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.ops.gemm.linear import measured
from slipstream.ops.gemm.linear.measured import GemvTimes
from slipstream.ops.platform import native


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(measured, "gemv_times", measured.gemv_times.__wrapped__)  # without its cache in memory
    return tmp_path / "cache"


def times_of(monkeypatch: pytest.MonkeyPatch, *rounds: GemvTimes) -> list[GemvTimes]:
    left = list(rounds)
    monkeypatch.setattr(measured, "_measure", lambda: left.pop(0))
    return left


def test_it_is_measured_once_and_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = times_of(monkeypatch, GemvTimes(2.0, 1.0))
    assert measured.bfloat16_is_faster() and not left
    assert measured.gemv_times() == GemvTimes(2.0, 1.0)
    assert len(list(folder.iterdir())) == 1


def test_slower_bfloat16_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times_of(monkeypatch, GemvTimes(1.0, 1.1))
    assert not measured.bfloat16_is_faster()


def test_other_kernels_and_damaged_files_are_measured_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = times_of(monkeypatch, GemvTimes(2.0, 1.0), GemvTimes(3.0, 1.0), GemvTimes(4.0, 1.0))
    measured.gemv_times()
    next(folder.iterdir()).write_text("{")
    assert measured.gemv_times() == GemvTimes(3.0, 1.0)
    monkeypatch.setattr(native, "identity", lambda: "other")
    assert measured.gemv_times() == GemvTimes(4.0, 1.0) and not left


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file in its place")
    times_of(monkeypatch, GemvTimes(2.0, 1.0))
    assert measured.bfloat16_is_faster()


def test_without_kernels_weights_become_float32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "build", lambda: False)
    assert not measured.bfloat16_is_faster()


@pytest.mark.parametrize(
    ("chosen", "fused", "bfloat16", "is_faster"),
    [(1.0, 3.0, 2.0, False), (3.0, 1.0, 2.0, False), (3.0, 2.5, 2.0, True), (1.0, 1.0, 1.0, True)],
)
def test_bfloat16_must_be_as_fast_as_both_functions_of_float32(
    chosen: float, fused: float, bfloat16: float, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_times(monkeypatch, chosen, fused, lambda call: bfloat16)
    assert measured._measure() == GemvTimes(min(chosen, fused), bfloat16)
    assert measured._measure().bfloat16_is_faster == is_faster


def test_a_program_that_slows_the_first_rounds_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, 2.0, 2.0, lambda call: 3.0 if call <= 6 else 1.0)
    assert measured._measure() == GemvTimes(2.0, 1.0)


def test_times_that_never_settle_end(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, 2.0, 2.0, lambda call: 0.9**call)
    assert measured._measure().bfloat16_is_faster


def set_times(monkeypatch: pytest.MonkeyPatch, chosen: float, fused: float, bfloat16: Callable[[int], float]) -> None:
    """Seconds of the three functions; that of bfloat16 by the number of the call."""
    now, calls = 0.0, 0

    def takes(seconds: dict[torch.dtype, Callable[[], float]]) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            nonlocal now
            now += seconds[weight.dtype]()
            return x

        return call

    def next_bfloat16() -> float:
        nonlocal calls
        calls += 1
        return bfloat16(calls)

    monkeypatch.setattr(measured, "linear", takes({torch.float32: lambda: chosen, torch.bfloat16: next_bfloat16}))
    monkeypatch.setattr(measured, "skinny_gemm", takes({torch.float32: lambda: fused}))
    monkeypatch.setattr(measured.time, "perf_counter", lambda: now)
    monkeypatch.setattr(measured, "_ROWS", 8)


def test_another_torch_is_measured_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = times_of(monkeypatch, GemvTimes(2.0, 1.0), GemvTimes(3.0, 1.0))
    measured.gemv_times()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert measured.gemv_times() == GemvTimes(3.0, 1.0) and not left


def test_the_measurement_gives_times(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    monkeypatch.setattr(measured, "_ROWS", 8)
    assert min(measured._measure()) > 0
