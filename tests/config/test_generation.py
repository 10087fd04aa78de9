from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.generation import GenerationDefaults, read_generation_defaults
from slipstream.errors import BadCheckpoint
from slipstream.params import SamplingParams


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


def test_a_gguf_file_has_no_folder_and_no_defaults(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert read_generation_defaults(file) == GenerationDefaults()
    assert read_generation_defaults(file, overrides={"top_k": 3}).params == {"top_k": 3}
