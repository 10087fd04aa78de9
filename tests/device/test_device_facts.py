"""Which device `auto` is."""

import pytest
import torch

from slipstream.device.device import _pinning_works, device_facts, seems_cuda
from slipstream.errors import InvalidOption


def test_the_environment_settles_what_auto_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7, 9))
    assert device_facts("auto").kind == "cpu"  # as tests have it
    monkeypatch.delenv("SLIPSTREAM_DEVICE")
    assert device_facts("auto").kind == "cuda"
    monkeypatch.setenv("SLIPSTREAM_DEVICE", "cpu")
    assert device_facts("auto").kind == "cpu"
    assert device_facts("cuda").kind == "cuda"  # who names a device gets it


def test_a_gpu_that_is_not_there_is_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLIPSTREAM_DEVICE", "cuda")
    with pytest.raises(InvalidOption, match="no CUDA GPU"):
        device_facts("auto")
    monkeypatch.setenv("SLIPSTREAM_DEVICE", "tpu")
    with pytest.raises(InvalidOption, match="SLIPSTREAM_DEVICE is tpu; it takes cpu or cuda"):
        device_facts("auto")
    monkeypatch.delenv("SLIPSTREAM_DEVICE")
    assert device_facts("auto").kind == "cpu"


def test_what_seems_to_be_a_gpu_is_found_without_asking_the_driver(monkeypatch):
    def ask():
        raise AssertionError("asked")

    there = {"/dev/nvidiactl"}
    monkeypatch.setattr(torch.cuda, "is_available", ask)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("os.path.exists", lambda path: path in there)
    monkeypatch.delenv("SLIPSTREAM_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert seems_cuda("auto") and seems_cuda("cuda") and not seems_cuda("cpu")
    monkeypatch.setenv("SLIPSTREAM_DEVICE", "cpu")
    assert not seems_cuda("auto")
    monkeypatch.delenv("SLIPSTREAM_DEVICE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not seems_cuda("auto")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert seems_cuda("auto")
    there.clear()
    assert not seems_cuda("auto") and seems_cuda("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not seems_cuda("cuda")


def test_a_platform_may_refuse_to_pin(monkeypatch):
    def refuse(*shape, pin_memory):
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch, "zeros", refuse)
    assert not _pinning_works()
