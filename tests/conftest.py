"""What all tests share."""

import importlib.metadata
import importlib.util
import os

import pytest
import torch

from slipstream.config.locate import LocatedModel, locate
from slipstream.errors import ModelNotFound

# Tests run on the CPU, GPU or not, in other processes too; those marked `cuda` name their device.
os.environ["SLIPSTREAM_DEVICE"] = "cpu"

# Kernels run in Triton's interpreter where there is no GPU. It must be chosen before anyone imports triton.
if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` are skipped where there is no GPU, and kernels where their interpreter does not work."""
    if torch.cuda.is_available():
        return
    broken = _version("triton") < (3, 7) and _version("numpy") >= (2, 4)
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif broken and item.path.name.startswith("test_triton_"):
            item.add_marker(pytest.mark.skip(reason="triton's interpreter before 3.7 does not work with numpy 2.4"))


@pytest.fixture(scope="session")
def default_model() -> LocatedModel:
    """The embedded model; the test is skipped where its package is missing."""
    try:
        return locate(None)
    except ModelNotFound as missing:
        pytest.skip(str(missing))


def _version(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return (0,)
