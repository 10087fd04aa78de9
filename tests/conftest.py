"""What all tests share."""

import importlib.util
import os

import pytest
import torch

# Kernels run in Triton's interpreter where there is no GPU. It must be chosen before anyone imports triton.
if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` are skipped where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
