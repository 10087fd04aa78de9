"""`slipstream replay`."""

from __future__ import annotations

import functools
import json
import random
import zlib
from collections import Counter

import msgspec
import pytest

from slipstream import LLM, SamplingParams
from slipstream.record.record_file import MAGIC, decode
from slipstream.serve.cli.main import main
from small_model import write_small


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    options = dict(load_format="dummy", skip_tokenizer_init=True, num_threads=1, use_tqdm_on_load=False, num_pages=64)
    with LLM(write_small(folder / "model"), max_num_seqs=4, max_num_batched_tokens=16, **options) as llm:
        llm.generate([[1, 2, 3, 4], [5]], SamplingParams(max_tokens=4, seed=1))
        llm.save_record(folder / "good.slipstream")
    recording = decode((folder / "good.slipstream").read_bytes(), "file")
    step = recording.steps[2]
    step.tokens = (step.tokens + 1) % 64
    (folder / "bad.slipstream").write_bytes(recording.encode())
    return folder


def test_a_good_recording_has_no_difference(recorded, capsys):
    assert main(["replay", str(recorded / "good.slipstream")]) == 0
    out = capsys.readouterr().out
    assert "4 steps checked" in out and "8 results compared" in out and "no difference" in out


def test_the_first_step_that_differs_is_named(recorded, capsys):
    assert main(["replay", str(recorded / "bad.slipstream"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["difference"].startswith("step 2: row ") and report["fault"] is None
    assert main(["replay", str(recorded / "bad.slipstream"), "--check-only"]) == 0, "tokens are not compared"


def test_a_recording_is_redacted_afterwards(recorded, capsys):
    out = recorded / "redacted.slipstream"
    assert main(["replay", str(recorded / "good.slipstream"), "--redact", str(out)]) == 0
    assert decode(out.read_bytes(), "file").redacted
    assert main(["replay", str(out), "--check-only"]) == 0
    assert "redacted" in capsys.readouterr().out


def test_a_wrong_file_or_model_is_one_line(recorded, capsys, tmp_path):
    (tmp_path / "text").write_text("no recording")
    for argv, said in (
        ([str(tmp_path / "text")], "not a recording"),
        ([str(tmp_path / "missing")], "cannot be read"),
    ):
        assert main(["replay", *argv]) == 2
        assert said in capsys.readouterr().err


def places_in(value, path=()):
    """Paths of all lists and values of decoded msgpack."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places_in(child, (*path, key))


def changed(rng, value):
    match value:
        case bytes():
            return rng.choice([b"", value + value, value[:-1], b"\xff" * len(value), bytes(rng.randbytes(len(value)))])
        case bool():
            return not value
        case int():
            return rng.choice([value + 1, value - 1, -1, 0, 2**62, -(2**40)])
        case float():
            return rng.choice([0.0, -1.0, float("nan"), float("inf")])
        case list():
            return rng.choice([[], value + value, value[:-1], value[::-1]])
        case str():
            return rng.choice(["", value + "x", "<f4", "<i8"])
    return rng.choice([0, [], "", {}])


@pytest.mark.parametrize("seed", range(2))
def test_a_recording_with_any_other_values_is_refused_or_checked(recorded, capsys, tmp_path, seed):
    """Its checksum finds damage by chance; these files have values that no recorder writes."""
    content = zlib.decompress((recorded / "good.slipstream").read_bytes()[len(MAGIC) :])
    rng, codes = random.Random(seed), Counter()
    for number in range(60):
        tree = msgspec.msgpack.decode(content)
        path = rng.choice([path for path in places_in(tree) if path[0] != "config" or number % 5 == 0])
        parent = functools.reduce(lambda value, key: value[key], path[:-1], tree)
        parent[path[-1]] = changed(rng, parent[path[-1]])
        file = tmp_path / "changed.slipstream"
        file.write_bytes(MAGIC + zlib.compress(msgspec.msgpack.encode(tree), 1))
        more = ["--check-only"] if number % 3 else []
        codes[main(["replay", str(file), *more])] += 1
        assert "Traceback" not in capsys.readouterr().err, path
    assert codes.keys() == {0, 1, 2}
    file.write_bytes(MAGIC + bytes(rng.randbytes(1)) + zlib.compress(content, 1)[1:])
    assert main(["replay", str(file)]) == 2
    assert "cannot be read" in capsys.readouterr().err
