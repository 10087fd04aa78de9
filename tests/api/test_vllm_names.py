"""vLLM's public names and arguments, as `scripts/vllm_names` lists them: each works or is refused by name."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from child import child_env
from slipstream.api.vllm import NOT_SUPPORTED
from slipstream.base.errors import InvalidOption
from slipstream.config.options import Options, make_options
from slipstream.config.vllm_args import NO_EFFECT, REFUSED, TRANSLATED

LISTED = json.loads((Path(__file__).parents[1] / "data" / "vllm_names.json").read_text())
ENGINE_ARGS = [*LISTED["classes"]["EngineArgs"]["fields"], "enable_log_requests", "swap_space", "chat_template"]
DEFAULTS = LISTED["classes"]["EngineArgs"]["defaults"]
OF_LLM = (
    "max_logprobs",
    "reasoning_parser",
    "use_tqdm_on_load",
    "spec_method",
    "spec_tokens",
    "disable_log_stats",
    "profiler_config",
    "structured_outputs_config",
)  # not only options; fmt: skip
KNOWN = set(Options.__struct_fields__)


@pytest.mark.parametrize("name", ENGINE_ARGS)
def test_each_engine_argument_is_known_and_its_default_accepted(name):
    kinds = [name in KNOWN or name in OF_LLM, name in NO_EFFECT, name in REFUSED]
    assert sum(kinds) == 1 or (name in TRANSLATED and sum(kinds) <= 1), kinds
    if name in OF_LLM:
        return
    make_options(**{name: None})
    if name in DEFAULTS and name != "model":
        assert make_options(**{name: DEFAULTS[name]}) is not None


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in KNOWN])
def test_what_is_not_supported_is_refused_by_name(name):
    with pytest.raises(InvalidOption, match=f"^{name}=.* is not supported: {re.escape(REFUSED[name][1])}"):
        make_options(**{name: "nonsense"})


def test_no_name_is_left_from_another_version():
    for name in (*NO_EFFECT, *REFUSED, *TRANSLATED):
        assert name in ENGINE_ARGS, name


PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_the_page_has_every_name_and_method():
    page = PAGE.read_text()
    own = {name for name in LISTED["names"] if f"`{name}`" in page}
    assert set(LISTED["names"]) == own
    for name in own - {"ModelRegistry", "initialize_ray_cluster"}:
        assert getattr(slipstream, name) is not None
    for name in LISTED["classes"]["LLM"]["methods"]:
        assert name == "__init__" or name in NOT_SUPPORTED or f"`LLM.{name}`" in page, name


@pytest.mark.parametrize("module", slipstream.VLLM_MODULES)
def test_vllms_modules_have_their_names(module):
    """In an interpreter of its own, where nothing else has loaded them."""
    names = slipstream.VLLM_MODULES[module]
    code = f"from slipstream.{module} import {', '.join(names)}\nimport slipstream, sys\n"
    code += "" if {"LLM", "LLMEngine"} & {*names} else "assert 'torch' not in sys.modules\n"
    code += "".join(f"assert getattr(slipstream, {name!r}, {name}) is {name}\n" for name in names)
    done = subprocess.run([sys.executable, "-c", code], env=child_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if module != "config":
        found = importlib.import_module(f"slipstream.{module}")
        assert sorted(dir(found)) == sorted(found.__all__) == sorted(names)


def test_names_that_vllms_modules_do_not_have_here():
    with pytest.raises(ImportError, match="use StructuredOutputsParams"):
        from slipstream.sampling_params import GuidedDecodingParams  # noqa: F401
    params = importlib.import_module("slipstream.sampling_params")
    with pytest.raises(AttributeError, match="no attribute 'x'; it has BeamSearchParams, RepetitionDetectionParams, "):
        params.x  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="No module named 'slipstream.multimodal'"):
        importlib.import_module("slipstream.multimodal")
    assert importlib.util.find_spec("sampling_params") is None
    assert importlib.util.find_spec("slipstream.config").origin.endswith("__init__.py")  # files come first
