"""Files of torch.save: tensors are read, anything else is refused before it can run."""

from __future__ import annotations

import os
import struct
import tempfile
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hand_encoder import load_pooling, run_texts
from slipstream.base.errors import BadCheckpoint
from slipstream.nn.weights.source import TorchFileSource
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
    with pytest.raises(BadCheckpoint, match="contains posix.mkdir, not only tensors.*convert it to safetensors"):
        read(tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()


def test_a_whole_module_is_not_a_list_of_tensors(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(3, 2), tmp_path / "module.pt")
    with pytest.raises(BadCheckpoint, match="torch.nn.modules.linear.Linear"):
        read(tmp_path / "module.pt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    with pytest.raises(BadCheckpoint, match="not a dictionary of tensors"):
        read(tmp_path / "numbers.pt")


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(b"\x80\x02\x8a\nl\xfc")
    with pytest.raises(BadCheckpoint, match="old.pt is not a zip file"):
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


def zip_with(
    path: Path, pickled: bytes, storages: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
    return path


def tensor_pickle(**changes: Any) -> bytes:
    """What torch.save writes for {"a": a tensor of two 32-bit numbers}, with some of it changed."""
    told = {
        "kind": b"X\x07\x00\x00\x00storage", "dtype": b"ctorch\nFloatStorage\n", "key": b"X\x01\x00\x00\x000",
        "function": b"ctorch._utils\n_rebuild_tensor_v2\n", "offset": b"K\x00", "shape": b"K\x02\x85",
        "strides": b"K\x01\x85", "name": b"X\x01\x00\x00\x00a", "before": b"", "after": b"",
    } | changes  # fmt: skip
    storage = b"(" + told["kind"] + told["dtype"] + told["key"] + b"X\x03\x00\x00\x00cpuK\x02tQ"
    tensor = told["function"] + b"(" + storage + told["offset"] + told["shape"] + told["strides"] + b"\x89}tR"
    return b"\x80\x02}" + told["name"] + told["before"] + tensor + told["after"] + b"s."


NUMBERS = {"0": struct.pack("<2f", 1.5, -2.5)}


def test_the_hand_written_pickle_is_one_that_works(tmp_path: Path) -> None:
    """So that the hostile ones below fail for what is changed in them."""
    assert read(zip_with(tmp_path / "x.pt", tensor_pickle(), NUMBERS))["a"].tolist() == [1.5, -2.5]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(protocol: int, tmp_path: Path) -> None:
    saved = OrderedDict(a=torch.arange(3), b=torch.ones(2, 2))
    torch.save(saved, tmp_path / "file.pt", pickle_protocol=protocol)
    assert {name: tensor.tolist() for name, tensor in read(tmp_path / "file.pt").items()} == {
        "a": [0, 1, 2], "b": [[1, 1], [1, 1]],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"function": b"cos\nsystem\n"}, "contains os.system"),
        ({"function": b"cbuiltins\neval\n"}, "contains builtins.eval"),
        ({"function": b"X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93"}, "contains os.system"),
        ({"function": b"ctorch\nFloatStorage\n"}, "a call of a value that is not a function"),
        ({"function": b"K\x01"}, "a call of a value that is not a function"),
        ({"function": b"ccollections\nOrderedDict\n"}, "is invalid"),
        ({"kind": b"X\x06\x00\x00\x00module"}, "a module that is not a tensor storage"),
        ({"dtype": b"X\x05\x00\x00\x00float"}, "not a tensor storage"),
        ({"key": b"K\x00"}, "not a tensor storage"),
        ({"shape": b"J\xfe\xff\xff\xff\x85"}, "integers >= 0"),
        ({"strides": b"J\xff\xff\xff\xff\x85"}, "integers >= 0"),
        ({"offset": b"X\x01\x00\x00\x00x"}, "integers >= 0"),
        ({"strides": b")"}, "1 dimensions has 0 strides"),
        ({"before": b"(i__main__\nEvil\n"}, "the instruction INST"),
        ({"before": b"(cos\nsystem\no"}, "contains os.system"),
        ({"before": b"\x8c\x02os\x8c\x06system\x93"}, "contains os.system"),
        ({"before": b"\x82\x01"}, "the instruction EXT1"),
        ({"before": b"ccollections\nOrderedDict\n)\x81"}, "the instruction NEWOBJ"),
        ({"before": b"Pmodel\n"}, "the instruction PERSID"),
        ({"before": b"h\x63"}, "is invalid"),
        ({"before": b"a"}, "expected a list"),
        ({"name": b")"}, "a dictionary with keys of type tuple"),
        ({"after": b"t"}, "is invalid"),
        ({"after": b"N"}, "expected a dict"),
    ],
)  # fmt: skip
def test_hostile_pickles_are_refused_by_name_and_run_nothing(
    changes: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        read(zip_with(tmp_path / "x.pt", tensor_pickle(**changes), NUMBERS))


def test_a_key_that_would_take_forever_to_hash_is_not_hashed(tmp_path: Path) -> None:
    pairs = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(100))
    with pytest.raises(BadCheckpoint, match="a dictionary with keys of type tuple"):
        read(zip_with(tmp_path / "x.pt", b"\x80\x02})" + pairs + b"Ns.", NUMBERS))


@pytest.mark.parametrize("storages", [{}, {"0": b"12345"}, {"0": b"1234"}], ids=["missing", "odd", "short"])
def test_numbers_that_are_not_there_are_missed(storages: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"x\.pt"):
        read(zip_with(tmp_path / "x.pt", tensor_pickle(), storages))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's own, of texts with odd escapes
@settings(max_examples=200, deadline=None, database=None)
@given(st.data())
def test_whatever_the_bytes_are_it_is_a_checkpoint_or_a_bad_one(data: st.DataObject) -> None:
    whole = bytearray(tensor_pickle())
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=6)):
        whole[place] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = zip_with(Path(folder) / "x.pt", bytes(whole), NUMBERS)
        with suppress(BadCheckpoint):
            read(path)


def test_a_small_file_cannot_become_a_large_pickle_or_tensor(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="contains compressed data.*convert it"):
        read(zip_with(tmp_path / "bomb.bin", b"\x80\x02]" + b"N" * 2**20 + b".", compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(BadCheckpoint, match="contains a pickle of .* bytes"):
        read(zip_with(tmp_path / "long.bin", b"\x80\x02]" + b"N" * 2**24 + b"."))
    with zipfile.ZipFile(tmp_path / "zeros.bin", "w") as archive:
        archive.writestr("archive/data.pkl", tensor_pickle())
        archive.writestr("archive/data/0", bytes(2**20), zipfile.ZIP_DEFLATED)
    with pytest.raises(BadCheckpoint, match="data/0 is compressed data"):
        read(tmp_path / "zeros.bin")


def test_names_that_are_huge_numbers_are_refused(tmp_path: Path) -> None:
    """A number of 5,000 digits has no text in Python."""
    name = b"\x8b" + struct.pack("<i", 3000) + b"\x01" * 3000
    with pytest.raises(BadCheckpoint, match="not a dictionary of tensors"):
        read(zip_with(tmp_path / "x.pt", tensor_pickle(name=name), NUMBERS))
