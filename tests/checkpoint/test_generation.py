from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.generation import GenerationDefaults, read_generation_defaults
from slipstream.config.options import Options
from slipstream.engine.build import open_model
from slipstream.params.sampling import SamplingParams
from tiny import write_tiny
from tiny_gguf import write_gguf


def read(folder: Path, content: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return read_generation_defaults(folder)


def test_no_file_gives_no_defaults(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults(params={}, eos_token_ids=())


def test_a_single_file_has_no_defaults_beside_it(tmp_path: Path) -> None:
    """A GGUF file is given by its own path."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert read_generation_defaults(file) == GenerationDefaults()


def test_what_the_sampler_knows_is_taken_and_the_rest_left(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {
            "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1,
            "max_new_tokens": 300, "eos_token_id": [7, 9, 7], "bos_token_id": 1, "max_length": 20,
        },
    )  # fmt: skip
    assert found.eos_token_ids == (7, 9)
    params = SamplingParams(**found.params)
    assert params == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1, max_tokens=300
    )


def test_do_sample_false_is_greedy_and_absent_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, {"do_sample": False, "temperature": 0.7}).params == {"temperature": 0.0}
    assert read(tmp_path, {"top_p": 0.9, "temperature": None}).params == {"top_p": 0.9}


def test_one_end_token_may_stand_without_a_list(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": 5}).eos_token_ids == (5,)


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "cannot be read"),
        ([], "does not hold an object"),
        ({"temperature": "warm"}, "temperature is 'warm'"),
        ({"top_p": 7}, "top_p is 7"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id is"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(BadCheckpoint, match=rf"generation_config.json.*{words}.*remove"):
        read(tmp_path, content)


GGUF = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.name": "a"}


def test_a_gguf_file_has_defaults_in_its_fields(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert read_generation_defaults(file, gguf={}) == GenerationDefaults()
    assert read_generation_defaults(file, gguf=GGUF).params == {"temperature": 0.6, "top_k": 20}
    assert read_generation_defaults(file, "vllm", gguf=GGUF) == GenerationDefaults()
    assert read_generation_defaults(file, "vllm", {"top_k": 3}, GGUF).params == {"top_k": 3}
    assert read_generation_defaults(file, overrides={"top_k": 3}, gguf=GGUF).params == {"temperature": 0.6, "top_k": 3}
    with pytest.raises(BadCheckpoint, match=r"model.gguf: top_p is 7.*set generation_config to vllm"):
        read_generation_defaults(file, gguf={"general.sampling.top_p": 7.0})


def test_an_engine_reads_the_defaults_of_its_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(write_tiny(tmp_path), gguf.GGMLQuantizationType.F16, fields={"general.sampling.top_k": 20})
    assert open_model(Options(model=str(path), device="cpu")).description.defaults.params == {"top_k": 20}
