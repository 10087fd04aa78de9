"""Which version of an op runs, with invented devices: no GPU is asked."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from child import child_env
from slipstream.ops.gemm.chains import Unnormalized
from slipstream.ops.platform import dispatch


def double(x: Any, times: int = 2) -> Any:
    return ("host", x, times)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("invented_kernels")
    module.double = lambda x, times=2: ("kernel", x, times)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "invented_kernels", module)
    return "invented_kernels"


def on(is_cuda: bool, dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(is_cuda=is_cuda, dtype=dtype)


def test_the_first_tensor_decides(kernels: str) -> None:
    op = dispatch._pick(double, kernels)
    here, there = on(False), on(True)
    assert op(here, times=3) == ("host", here, 3)
    assert op(there, 5) == ("kernel", there, 5)
    assert op.__name__ == "double"


def test_an_op_without_a_kernel_names_itself_and_the_module(kernels: str) -> None:
    def triple(x: Any) -> Any:
        return x

    op = dispatch._pick(triple, kernels)
    here = on(False)
    assert op(here) is here
    with pytest.raises(NotImplementedError, match="triple has no CUDA kernel: invented_kernels does not define it"):
        op(on(True))


def test_float64_stays_with_the_host_version(kernels: str) -> None:
    x = on(True, torch.float64)
    assert dispatch._pick(double, kernels)(x)[0] == "host"


def test_without_cuda_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert dispatch.by_device(double, "no_such_module") is double


def test_without_triton_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert dispatch.by_device(double, "no_such_module") is double


def add_one_(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


@pytest.mark.parametrize("wrong", [False, True])
def test_validating_compares_results_and_arguments(wrong: bool) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        result = x.add_(1).clone()
        if wrong:
            x[0] += 1  # the result is right, what was done in place is not
        return result

    with dispatch.validating() as compared:
        if wrong:
            with pytest.raises(AssertionError, match="add_one_"):
                dispatch._run_both(add_one_, kernel, (torch.zeros(3),), {})
        else:
            assert dispatch._run_both(add_one_, kernel, (torch.zeros(3),), {}).tolist() == [1, 1, 1]
    assert compared == ["add_one_"]
    assert dispatch._validated is None


def test_ops_on_the_cpu_leave_triton_alone() -> None:
    program = """
import sys, torch
from slipstream.ops import elementwise, sampling
x = torch.randn(2, 8)
sampling.argmax_rows(x), sampling.step_keys(torch.tensor([1, 2]), torch.tensor([3, 4]), 0)
elementwise.rms_norm(x, torch.ones(8), 1e-6), elementwise.silu_and_mul(x)
assert "triton" not in sys.modules
assert not any(name.endswith("triton") for name in sys.modules if "slipstream" in name)
"""
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env=child_env(SLIPSTREAM_NATIVE="0"),
    )


def test_the_first_argument_of_every_dispatched_op_is_a_tensor() -> None:
    """Its device and dtype choose the implementation. In a torch without CUDA nothing else would notice another
    argument. `Unnormalized` has both, as a tensor."""
    assert {"is_cuda", "dtype"} <= set(dir(Unnormalized))
    found = []
    ops = Path(dispatch.__file__).parents[1]
    for path in sorted(ops.rglob("__init__.py")):
        for name in re.findall(r"by_device\(\w+\.(\w+)", path.read_text(encoding="utf-8")):
            module = importlib.import_module(".".join(("slipstream", "ops", *path.parent.relative_to(ops).parts)))
            first = next(iter(inspect.signature(getattr(module, name)).parameters.values()))
            found.append(name)
            assert str(first.annotation) in ("torch.Tensor", "torch.Tensor | Unnormalized"), f"{name}({first}, ...)"
    assert len(found) > 20 and "propose_from_history_" in found
