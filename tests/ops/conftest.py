"""What tests of kernels share."""

import pytest
import torch


@pytest.fixture
def kernel_device() -> torch.device:
    """Where kernels run in these tests: the GPU if there is one, else the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """The fused C kernels, compiled if need be; skips where there is no compiler."""
    from slipstream.ops.platform import native

    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
