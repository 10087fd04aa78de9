"""Files of torch.save: tensors are read, anything else is refused before it can run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hand_encoder import load_pooling, run_texts
from slipstream.errors import BadCheckpoint
from slipstream.nn.weights.torch_file import TorchFileSource
from tiny_encoder import write_tiny_encoder


def read(path: Path) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.read() for tensor in TorchFileSource([path])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_tensors_come_back_as_they_were(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(4, 6).mul(10).to(dtype)
    saved = {"a": x, "view": x[1:3, 2:5], "turned": x.t(), "scalar": x[0, 0], "empty": x[:0]}
    torch.save(saved, tmp_path / "file.pt")
    found = read(tmp_path / "file.pt")
    assert found.keys() == saved.keys()
    assert all(found[name].equal(saved[name]) and found[name].dtype is dtype for name in saved)


def test_parameters_and_the_state_of_a_module(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    torch.save({"state_dict": {"w": module.weight}, "epoch": 3}, tmp_path / "nested.pt")
    assert read(tmp_path / "state.pt")["bias"].equal(module.bias)
    assert read(tmp_path / "nested.pt")["w"].equal(module.weight)


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_what_would_run_is_refused_and_does_not_run(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2), "b": _Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    with pytest.raises(BadCheckpoint, match="holds posix.mkdir, not only tensors.*convert it to safetensors"):
        read(tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()


def test_a_whole_module_is_not_a_list_of_tensors(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(3, 2), tmp_path / "module.pt")
    with pytest.raises(BadCheckpoint, match="torch.nn.modules.linear.Linear"):
        read(tmp_path / "module.pt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    with pytest.raises(BadCheckpoint, match="not a list of named tensors"):
        read(tmp_path / "numbers.pt")


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(b"\x80\x02\x8a\nl\xfc")
    with pytest.raises(BadCheckpoint, match="old.pt is no zip file"):
        read(tmp_path / "old.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(BadCheckpoint, match="older than torch 1.6"):
        read(tmp_path / "legacy.pt")
    whole = tmp_path / "whole.pt"
    torch.save({"a": torch.zeros(200)}, whole)
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:300])
    with pytest.raises(BadCheckpoint, match=r"cut\.pt"):
        read(tmp_path / "cut.pt")


def test_a_checkpoint_that_has_no_other_weights(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path)
    prompts = [[5, 6, 7]]
    expected = run_texts(load_pooling(folder), prompts)[0]
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert run_texts(load_pooling(folder), prompts)[0].equal(expected)
