"""Models that are split into several GGUF files."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest

from hand_batch import HandRunner
from hand_load import load
from slipstream import LLM, SamplingParams
from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.locate import model_name, part_paths
from tiny import write_tiny
from tiny_gguf import write_gguf

KIND = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    write_gguf(folder, KIND)
    write_gguf(folder, KIND, part_tensors=9)
    return folder


@pytest.fixture
def parts(written: Path, tmp_path: Path) -> list[Path]:
    found = sorted(written.glob("model-*.gguf"))
    assert [path.name for path in found] == [f"model-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    return [Path(shutil.copy(path, tmp_path)) for path in found]


def test_parts_are_the_whole(written: Path, parts: list[Path]) -> None:
    whole, file = GgufFile(written / "model.gguf"), GgufFile(parts[0])
    assert {**file.fields, **whole.fields} == dict(file.fields)
    assert set(file.fields) - set(whole.fields) == {"split.no", "split.count", "split.tensors.count"}
    assert file.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert (file.tensors[name].shape, file.tensors[name].kind) == (tensor.shape, tensor.kind)
        assert bytes(file.tensors[name].raw) == bytes(tensor.raw)
    prompt = {"a": [3, 1, 4, 1, 5]}
    expected = HandRunner(load(written / "model.gguf")).run(prompt)["a"]
    assert HandRunner(load(parts[0])).run(prompt)["a"].equal(expected)


@pytest.mark.parametrize("place", [0, 2, None], ids=["first", "last", "folder"])
def test_an_engine_runs_from_any_of_them(written: Path, parts: list[Path], place: int | None) -> None:
    options = dict(tokenizer=str(written), use_tqdm_on_load=False, max_model_len=32, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM(str(written / "model.gguf"), **options) as llm:  # type: ignore[arg-type]
        expected = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    given = parts[0].parent if place is None else parts[place]
    with LLM(str(given), **options) as llm:  # type: ignore[arg-type]
        assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == expected
        assert llm.config.model.name == "model"


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(BadCheckpoint, match="lacks 1 of its 3 parts, model-00002-of-00003.gguf first"):
        GgufFile(parts[0])


def test_parts_that_do_not_belong_together_are_named(parts: list[Path]) -> None:
    shutil.copy(parts[2], parts[1])
    with pytest.raises(BadCheckpoint, match="model-00002-of-00003.gguf says that it is part 3 of 3"):
        GgufFile(parts[0])


def test_a_later_part_or_another_name_is_refused(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="part 2 of 3; give the first"):
        GgufFile(parts[1])
    renamed = parts[0].rename(tmp_path / "mine.gguf")
    with pytest.raises(BadCheckpoint, match=r"mine.gguf is part 1 of 3; .* named \.\.\.-00001-of-00003\.gguf"):
        GgufFile(renamed)


def test_a_tensor_in_two_parts_is_named(written: Path, parts: list[Path]) -> None:
    data = bytearray(parts[1].read_bytes())
    first, second = (list(GgufFile(written / "model.gguf").tensors)[place] for place in (0, 9))
    assert len(first) == len("token_embd.weight") and second.encode() in data
    again = next(name for name in list(GgufFile(written / "model.gguf").tensors)[:9] if len(name) == len(second))
    place = data.index(second.encode())
    data[place : place + len(second)] = again.encode()
    parts[1].write_bytes(data)
    with pytest.raises(BadCheckpoint, match=f"has {again}, which another part has too"):
        GgufFile(parts[0])


@pytest.mark.parametrize(
    ("name", "count"),
    [("a-00002-of-00003.gguf", 3), ("a-00001-of-00001.gguf", 1), ("a-00004-of-00003.gguf", 1), ("a-1-of-3.gguf", 1)],
)
def test_names_of_parts(name: str, count: int) -> None:
    paths = part_paths(Path("x") / name)
    assert len(paths) == count and Path("x") / name in paths
    assert model_name(Path("x") / name) == ("a" if "-000" in name else "a-1-of-3")
