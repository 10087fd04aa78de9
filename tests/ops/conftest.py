"""Kernels run in Triton's interpreter where there is no GPU. It must be chosen before triton is first imported."""

import importlib.util
import os
import sys

import torch

if "triton" not in sys.modules and importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
