from pathlib import Path

import pytest

import slipstream
from nets.encoding_net import find_unnamed, find_unnamed_in


@pytest.mark.parametrize(
    "line",
    [
        "path.read_text()",
        "(folder / name).write_text(text)",
        "open(path)",
        'open(path, "w")',
        "open(path, mode)",
        'open(path, mode="r")',
        "subprocess.run(command, text=True)",
        "subprocess.Popen(command, universal_newlines=True)",
    ],
)
def test_a_file_in_the_locales_encoding_is_found(line):
    assert find_unnamed(f"def f():\n    {line}\n")


@pytest.mark.parametrize(
    "line",
    [
        'path.read_text(encoding="utf-8")',
        'open(path, "rb")',
        'open(path, mode="wb")',
        'open(path, mode, encoding="utf-8")',
        "os.open(path, flags)",
        "ring.open()",
        'subprocess.run(command, text=True, encoding="utf-8")',
        "subprocess.run(command)",
    ],
)
def test_a_named_encoding_and_bytes_pass(line):
    assert not find_unnamed(f"def f():\n    {line}\n")


def test_no_file_depends_on_the_locale():
    assert not find_unnamed_in(Path(slipstream.__file__).parent)
