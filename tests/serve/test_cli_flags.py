import argparse
import re
from pathlib import Path

import msgspec
import pytest

import slipstream
from slipstream.config.options import Options
from slipstream.params.sampling import SamplingParams
from slipstream.serve.cli.flags import (
    SAMPLING,
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    sampling_changes,
)
from slipstream.serve.http.server.settings import ServerSettings


def unread_options(struct, source):
    """Fields that no code reads: options that are accepted and ignored."""
    read = set(re.findall(r"\b(?:options|settings|given)\.(\w+)", source))
    return [name for name in struct.__struct_fields__ if name not in read]


def test_every_option_is_read_by_some_code():
    files = sorted(Path(slipstream.__file__).parent.rglob("*.py"))
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert unread_options(Options, source) == unread_options(ServerSettings, source) == []


def test_an_option_that_no_code_reads_is_found():
    struct = msgspec.defstruct("Planted", ["depth", "seed"])
    assert unread_options(struct, "depth = options.depth\nseed = seeds.seed, options.seed_of") == ["seed"]


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_engine_flags(parser)
    add_sampling_flags(parser, max_tokens=99)
    return parser


def test_every_option_has_a_flag_with_its_description(parser):
    text = " ".join(parser.format_help().split())
    for name in Options.__struct_fields__:
        assert f"--{name.replace('_', '-')}" in text
    assert "positions per page of the KV cache (default: 16)" in text
    assert "pages of equal prompt prefixes (default: yes)" in text
    assert "--dtype {auto,float32,float64,bfloat16,float16}" in text
    assert "--max-model-len N|auto" in text


def test_flags_that_are_not_given_are_left_to_their_defaults(parser):
    args = parser.parse_args([])
    assert engine_options(args) == {}
    assert sampling_changes(args) == {"max_tokens": 99}


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--model", "m"], {"model": "m"}),
        (["--page-size", "32"], {"page_size": 32}),
        (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--dequantize", "--dtype", "float64"], {"dequantize": True, "dtype": "float64"}),
        (["--max-model-len", "auto"], {"max_model_len": "auto"}),
        (["--max-model-len", "-1"], {"max_model_len": -1}),
        (["--kv-cache-memory", "2GiB"], {"kv_cache_memory": "2GiB"}),
        (["--kv-cache-memory", "4096"], {"kv_cache_memory": 4096}),
        (["--depth", "0", "--seed", "3"], {"depth": 0, "seed": 3}),
    ],
)
def test_flags_become_options(parser, flags, options):
    given = engine_options(parser.parse_args(flags))
    assert given == options
    assert msgspec.structs.replace(Options(), **given) == Options(**options)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--page-size", "many"], "'many' given; it takes a whole number"),
        (["--max-model-len", "long"], "'long' given; it takes a whole number or 'auto'"),
        (["--temperature", "hot"], "'hot' given; it takes a number"),
        (["--dtype", "float8"], "invalid choice: 'float8'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(parser, flags, message):
    with pytest.raises(argparse.ArgumentError, match=message):
        parser.parse_args(flags)


def test_sampling_flags_are_fields_of_sampling_params(parser):
    assert not set(SAMPLING) & set(Options.__struct_fields__)
    flags = ["--temperature", "0.5", "--top-k", "-1", "--stop", "a", "--stop", "b", "--ignore-eos", "--max-tokens", "3"]
    changes = sampling_changes(parser.parse_args(flags))
    assert changes == {"temperature": 0.5, "top_k": -1, "stop": ["a", "b"], "ignore_eos": True, "max_tokens": 3}
    assert SamplingParams(**changes).stop_strings == ("a", "b")
