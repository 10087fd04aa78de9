from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from slipstream.base.errors import BadCheckpoint, ModelError, UnsupportedModel
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.locate import LocatedModel


def write_tiny(path: Path) -> Path:
    """One of each kind of field, and tensors plain and packed."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -128)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -5)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -7)
    writer.add_uint64("a.u64", 2**63 + 1)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_bool("a.no", False)
    writer.add_string("a.text", "naïve 漢字")
    writer.add_array("a.texts", ["", "a", "é" * 40])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_array("a.bools", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("plain", rng.standard_normal((2, 3, 5)).astype(np.float32))
    writer.add_tensor("half", rng.standard_normal(7).astype(np.float16))
    packed = gguf.quantize(rng.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture
def tiny(tmp_path: Path, tiny_bytes: bytes) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_bytes)
    return path


def read_all(path: Path) -> GgufFile:
    file = GgufFile(path)
    for key in file.fields:
        file.fields[key]
    return file


def hand_made(*parts: bytes, num_tensors: int = 0, num_fields: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + b"".join(parts)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def oracle_value(field: Any) -> Any:
    if field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]:  # contents() is slow on a vocabulary
        return [field.parts[place].tobytes().decode() for place in field.data]
    return field.contents()


def assert_same_as_oracle(path: Path) -> None:
    ours, oracle = GgufFile(path), gguf.GGUFReader(path)
    theirs = {key: oracle_value(field) for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.fields) == list(theirs)
    for key, value in theirs.items():
        assert ours.fields[key] == value, key
    assert list(ours.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.name == tensor.name
        assert mine.shape == tuple(reversed([int(n) for n in tensor.shape]))
        assert mine.kind == tensor.tensor_type.name
        assert np.array_equal(mine.raw, tensor.data.view(np.uint8).reshape(-1))


def test_the_real_model_reads_as_the_oracle_reads_it(default_model: LocatedModel) -> None:
    assert_same_as_oracle(default_model.path)


def test_a_tiny_file_of_every_kind_reads_as_the_oracle_reads_it(tiny: Path) -> None:
    assert_same_as_oracle(tiny)
    tensors = GgufFile(tiny).tensors
    assert tensors["plain"].shape == (2, 3, 5)
    assert (tensors["packed"].kind, tensors["packed"].shape, len(tensors["packed"].raw)) == ("Q8_0", (4, 64), 4 * 68)


def test_sizes_of_all_kinds_are_the_oracles(tmp_path: Path) -> None:
    skipped = {"Q8_1"}  # only ever used in registers
    for kind, (block, size) in GGML_QUANT_SIZES.items():
        if kind.name in skipped:
            continue
        entry = text("t") + struct.pack("<IQIQ", 1, block * 2, kind.value, 0)
        body = hand_made(entry, num_tensors=1)
        (tmp_path / "one.gguf").write_bytes(body.ljust(-(-len(body) // 32) * 32, b"\0") + bytes(size * 2))
        tensor = GgufFile(tmp_path / "one.gguf").tensors["t"]
        assert (tensor.kind, len(tensor.raw)) == (kind.name, size * 2)


def test_writing_to_a_view_leaves_the_file_alone(tiny: Path, tiny_bytes: bytes) -> None:
    GgufFile(tiny).tensors["plain"].raw[:] = 0
    assert tiny.read_bytes() == tiny_bytes


def test_views_outlive_the_file_object(tiny: Path) -> None:
    raw = GgufFile(tiny).tensors["half"].raw
    assert np.array_equal(raw, GgufFile(tiny).tensors["half"].raw)


def test_version_2_nested_arrays_and_another_alignment(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2H", 2, 2, 7, 8)
    words = struct.pack("<IQ", 8, 2) + text("x") + text("yz")
    parts = (
        text("nested") + struct.pack("<IIQ", 9, 9, 3) + inner + words + struct.pack("<IQ", 0, 0),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("t") + struct.pack("<IQIQ", 1, 4, 24, 64),
    )
    body = hand_made(*parts, num_tensors=1, num_fields=2, version=2)
    path = tmp_path / "v2.gguf"
    path.write_bytes(body.ljust(-(-len(body) // 64) * 64 + 64, b"\0") + b"\1\2\3\4")
    file = GgufFile(path)
    assert file.version == 2
    assert file.fields["nested"] == [[7, 8], ["x", "yz"], []]
    assert bytes(file.tensors["t"].raw) == b"\1\2\3\4"


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, tiny_bytes: bytes) -> None:
    path = tmp_path / "cut.gguf"
    tensors = GgufFile(write_tiny(tmp_path / "whole.gguf")).tensors
    data_start = tiny_bytes.index(tensors["plain"].raw.tobytes())
    needed = tiny_bytes.index(tensors["packed"].raw.tobytes()) + len(tensors["packed"].raw)  # padding may follow
    for size in (*range(data_start + 4), *range(data_start + 4, needed, 29), needed - 1):
        path.write_bytes(tiny_bytes[:size])
        with pytest.raises(BadCheckpoint, match="cut.gguf.*download it again"):
            GgufFile(path)


@pytest.mark.parametrize("claim, step", [(2**64 - 1, 1), (2**40, 5)])
def test_a_huge_number_anywhere_is_refused_or_harmless(
    tmp_path: Path, tiny_bytes: bytes, claim: int, step: int
) -> None:
    path = tmp_path / "huge.gguf"
    data_start = tiny_bytes.index(GgufFile(write_tiny(tmp_path / "whole.gguf")).tensors["plain"].raw.tobytes())
    num_refused = 0
    places = range(4, data_start - 8, step)
    for place in places:
        path.write_bytes(tiny_bytes[:place] + struct.pack("<Q", claim) + tiny_bytes[place + 8 :])
        try:
            read_all(path)
        except ModelError:
            num_refused += 1
    assert num_refused > len(places) // 3


def test_random_damage_gives_an_error_of_ours_or_none(tmp_path: Path, tiny_bytes: bytes) -> None:
    rng = random.Random(0)
    path = tmp_path / "damaged.gguf"
    for _ in range(700):
        data = bytearray(tiny_bytes)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            read_all(path)
        except ModelError:
            pass


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is empty"),
        (b"PK\3\4 and so on", "begins with b'PK"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (hand_made(version=1), "version 1"),
        (hand_made(num_fields=2**60), "claims 1,152,921,504,606,846,976 fields"),
        (hand_made(num_tensors=2**60), "1,152,921,504,606,846,976 tensors"),
        (hand_made(text("k") + struct.pack("<I", 99) + bytes(20), num_fields=1), "unknown type 99"),
        (
            hand_made(text("k") + struct.pack("<IIQ", 9, 8, 2**50) + bytes(20), num_fields=1),
            "claims 1,125,899,906,842,624",
        ),
        (
            hand_made(text("k") + struct.pack("<IIQ", 9, 77, 1) + bytes(20), num_fields=1),
            "array of the unknown type 77",
        ),
        (hand_made(text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, num_fields=1), "nests arrays"),
        (hand_made((text("k") + struct.pack("<II", 4, 1)) * 2, num_fields=2), "field k is there twice"),
        (hand_made(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1), num_fields=1), "is not UTF-8"),
        (hand_made(struct.pack("<Q", 70_000) + bytes(70_000), num_fields=1), "at most 65,535"),
        (hand_made(text("general.alignment") + struct.pack("<II", 4, 3), num_fields=1), "not a power of two"),
        (hand_made(text("t") + struct.pack("<I", 9) + bytes(99), num_tensors=1), "9 dimensions"),
        (hand_made(text("t") + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(99), num_tensors=1), "packs them by 32"),
        (hand_made(text("t") + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0), num_tensors=1), "so it was cut short"),
        (hand_made((text("t") + struct.pack("<IQIQ", 1, 1, 24, 0)) * 2 + bytes(64), num_tensors=2), "t is there twice"),
    ],
)
def test_each_fault_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=words):
        GgufFile(path)


def test_a_bad_string_in_a_list_is_named_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    strings = struct.pack("<IIQ", 9, 8, 2) + text("ok") + struct.pack("<Q", 1) + b"\xff"
    path.write_bytes(hand_made(text("k") + strings, num_fields=1))
    fields: Any = GgufFile(path).fields
    with pytest.raises(BadCheckpoint, match="string 1 of field k is not UTF-8"):
        fields["k"]


def test_an_unknown_tensor_type_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(hand_made(text("t") + struct.pack("<IQIQ", 1, 32, 200, 0), num_tensors=1))
    with pytest.raises(UnsupportedModel, match="type number 200"):
        GgufFile(path)
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")
