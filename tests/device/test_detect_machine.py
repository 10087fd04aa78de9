"""Which device `auto` is."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.base.errors import InvalidOption
from slipstream.config.options import make_options
from slipstream.device.device import _pinning_works, detect_machine, open_device, seems_cuda


def test_the_environment_settles_what_auto_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(multi_processor_count=132))
    assert detect_machine("auto").kind == "cpu"  # as tests have it
    monkeypatch.delenv("SLIPSTREAM_DEVICE")
    assert (detect_machine("auto").kind, detect_machine("auto").num_multiprocessors) == ("cuda", 132)
    monkeypatch.setenv("SLIPSTREAM_DEVICE", "cpu")
    assert detect_machine("auto").kind == "cpu"
    assert detect_machine("cuda").kind == "cuda"  # who names a device gets it


def test_a_gpu_that_is_not_there_is_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLIPSTREAM_DEVICE", "cuda")
    with pytest.raises(InvalidOption, match="no CUDA GPU"):
        detect_machine("auto")
    monkeypatch.delenv("SLIPSTREAM_DEVICE")
    assert detect_machine("auto").kind == "cpu"


OTHERS = ["mps", "xpu", "hpu", "tpu", "hip", "rocm", "meta", "CPU", "gpu", "cuda:x", "cpu:0", ""]


@pytest.mark.parametrize("device", OTHERS)
def test_a_device_that_is_neither_cpu_nor_cuda_is_refused_by_name(device, monkeypatch):
    with pytest.raises(InvalidOption, match=f"device is '{device}', which is not supported: models run on cpu, and on"):
        make_options(device=device)
    if device:  # an empty variable is as good as none
        monkeypatch.setenv("SLIPSTREAM_DEVICE", device)
        with pytest.raises(InvalidOption, match=f"SLIPSTREAM_DEVICE is '{device}', which is not supported: models run"):
            detect_machine("auto")


def test_the_error_for_a_gpu_number_says_how_to_choose_it(monkeypatch):
    with pytest.raises(InvalidOption, match="device is 'cuda:3', .* takes cuda, and CUDA_VISIBLE_DEVICES=3"):
        make_options(device="cuda:3")
    monkeypatch.setenv("SLIPSTREAM_DEVICE", "cuda:0")
    with pytest.raises(InvalidOption, match="SLIPSTREAM_DEVICE is 'cuda:0', .* CUDA_VISIBLE_DEVICES=0"):
        detect_machine("auto")


def test_a_device_is_given_as_text():
    assert make_options(device=None).device == "auto"  # None is the default of every option
    for device in (0, torch.device("cpu")):
        with pytest.raises(InvalidOption, match="device is .*; it takes 'auto' or 'cpu' or 'cuda'"):
            make_options(device=device)


def test_an_amd_gpu_is_not_taken_for_one_of_cuda(monkeypatch):
    """A torch for ROCm says that CUDA is available."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for said in ("", "auto"):
        monkeypatch.setenv("SLIPSTREAM_DEVICE", said)
        assert detect_machine("auto").kind == "cpu"
    with pytest.raises(InvalidOption, match='built for ROCm, whose GPUs are not supported; use device="cpu"'):
        detect_machine("cuda")


def test_no_other_device_is_opened():
    with pytest.raises(AssertionError, match="there is no device mps"):
        open_device("mps", 0, 1)


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


def test_a_cpu_computes_in_float32(monkeypatch):
    """Also one with bfloat16 instructions, which was slower in bfloat16."""
    real = open

    def fake(path: object, *args: Any, **kwargs: Any) -> Any:
        if path == "/proc/cpuinfo":
            return io.StringIO("flags : avx512_bf16 amx_bf16\nFeatures : bf16\n")
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", fake)
    assert detect_machine("cpu").fast_dtypes == ("float32",)
