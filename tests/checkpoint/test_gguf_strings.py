from __future__ import annotations

import mmap
import random
import struct

import pytest

from slipstream.checkpoint.gguf_file import decode_strings, find_strings, first_bad_string

HEAD = b"GGUF and more"  # whatever is before the array


def file_of(*texts: bytes, tail: bytes = b"") -> mmap.mmap:
    data = HEAD + b"".join(struct.pack("<Q", len(text)) + text for text in texts) + tail
    file = mmap.mmap(-1, len(data))
    file.write(data)
    return file


def read(file: mmap.mmap, count: int) -> list[str] | None:
    offsets = find_strings(file, len(HEAD), count)
    return None if offsets is None else decode_strings(file, offsets)


def vocabulary(size: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcĠ漢😀 é", k=rng.randint(1, 12))) for _ in range(size)]


ODD = {
    "none": [],
    "empty": [""],
    "several empty": ["", "", ""],
    "a zero": ["\0"],
    "zeros around": ["\0a\0", "\0" * 7, "\0" * 8, "x" + "\0" * 7 + "y"],
    "like a length": ["\1\0\0\0\0\0\0\0", "\5" + "\0" * 6],
    "255 bytes": ["a" * 255],
    "256 bytes": ["Ġ" * 128],
    "257 bytes": ["a" * 257],
    "70,000 bytes": ["é" * 35_000],
}


@pytest.mark.parametrize("tail", [b"", b"\0" * 40, b"\3\0\0\0\0\0\0\0abc"], ids=["end", "zeros", "another string"])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_strings_are_found_around_odd_ones(odd: list[str], tail: bytes) -> None:
    for strings in (
        odd,
        [*odd, *vocabulary(30)],
        [*vocabulary(30), *odd],
        [*vocabulary(9), *odd, *vocabulary(9), *odd],
    ):
        assert read(file_of(*(text.encode() for text in strings), tail=tail), len(strings)) == strings


def test_strings_of_several_windows_with_odd_ones_between() -> None:
    strings = vocabulary(60_000)  # more than a megabyte
    rng = random.Random(1)
    for _ in range(40):
        strings[rng.randrange(len(strings))] = rng.choice(("", "a" * 300, "b\0c"))
    assert read(file_of(*(text.encode() for text in strings)), len(strings)) == strings


def test_fewer_strings_than_there_are() -> None:
    strings = vocabulary(20)
    assert read(file_of(*(text.encode() for text in strings)), 7) == strings[:7]
    assert read(file_of(*(text.encode() for text in strings)), 0) == []


def test_a_file_of_empty_strings_is_not_searched_again_for_each() -> None:
    assert read(file_of(*[b""] * 200_000), 200_000) == [""] * 200_000  # minutes if it were


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_a_file_that_ends_before_the_last_string(odd: list[str]) -> None:
    strings = [text.encode() for text in (*vocabulary(5), *odd, "end")]
    whole = bytes(file_of(*strings))
    assert read(file_of(*strings), len(strings) + 1) is None
    for missing in (1, 3, 4, 11, 12):
        file = mmap.mmap(-1, len(whole) - missing)
        file.write(whole[:-missing])
        assert find_strings(file, len(HEAD), len(strings)) is None, missing


@pytest.mark.parametrize("length", [255, 2**16, 2**40, 2**63, 2**64 - 1])
def test_a_length_beyond_the_file(length: int) -> None:
    assert read(file_of(b"a", b"b", tail=struct.pack("<Q", length) + b"cd"), 3) is None


@pytest.mark.parametrize("odd", [b"", b"\0"])
def test_the_first_text_that_is_not_utf8_is_found(odd: bytes) -> None:
    file = file_of(b"a", odd, "é".encode()[:1], "é".encode()[1:], b"b")  # both halves of a character: two bad texts
    offsets = find_strings(file, len(HEAD), 5)
    assert offsets is not None
    with pytest.raises(UnicodeDecodeError):
        decode_strings(file, offsets)
    assert first_bad_string(file, offsets) == 2
