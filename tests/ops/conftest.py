"""Kernels run in Triton's interpreter where there is no GPU. It must be chosen before triton is first imported."""

import importlib.util
import os
import sys

import pytest
import torch

if "triton" not in sys.modules and importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def kernel_device() -> torch.device:
    """Where kernels run in these tests: the GPU if there is one, else the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """The fused C kernels, compiled if need be; skips where there is no compiler."""
    from slipstream.ops import native

    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
