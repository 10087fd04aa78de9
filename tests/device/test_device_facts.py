"""Which device `auto` is."""

import pytest
import torch

from slipstream.device.device import device_facts
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
