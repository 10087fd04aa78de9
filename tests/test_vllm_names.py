"""vLLM's public names and arguments, as `scripts/vllm_names` lists them: each works or is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import slipstream
from slipstream.config.options import Options, make_options
from slipstream.config.vllm_args import NO_EFFECT, REFUSED, TRANSLATED
from slipstream.errors import InvalidOption
from slipstream.frontend.vllm_methods import NOT_SUPPORTED

LISTED = json.loads((Path(__file__).parent / "data" / "vllm_names.json").read_text())
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


def constructor_rows() -> list[str]:
    """The table of docs/vllm.md, argument by argument."""
    rows = []
    for name in ENGINE_ARGS:
        if name in NO_EFFECT and name not in KNOWN:
            what = f"accepted, changes nothing: {NO_EFFECT[name]}"
        elif name in REFUSED and name not in KNOWN:
            values = ", ".join(f"`{value!r}`" for value in REFUSED[name][0])
            what = f"refused{f' unless {values}' if values else ''}: {REFUSED[name][1]}"
        else:
            what = TRANSLATIONS.get(name, "the same")
        rows.append(f"| `{name}` | {what} |")
    return rows


TRANSLATIONS = {
    "block_size": "`page_size`",
    "kv_cache_memory_bytes": "`kv_cache_memory`, which also takes texts like 2GiB",
    "num_gpu_blocks_override": "`num_pages`",
    "dtype": "the same, with half, float and torch dtypes",
    "runner": "generate: `task`; every model can pool, so pooling changes nothing",
    "convert": "embed and classify: `task`",
    "async_scheduling": "True: `depth` 1; False: `depth` 0",
    "scheduling_policy": "accepted: requests run by priority, those of one priority in order of arrival",
    "served_model_name": "the same; a list may have one name",
    "pooler_config": "`pooling_type`, `use_activation` and `task`; the other fields are in `PoolingParams`",
    "spec_method": "`speculative_config`",
    "spec_tokens": "`speculative_config`",
    "hf_overrides": "the same, as an object; a function is refused; `head_dtype` must be that of the head: the model's "
    "for tokens, float32 behind a pooling; `classifier_from_token` is for Qwen3-Reranker",
    "max_logprobs": "the same; without it there is no limit",
    "kv_cache_dtype": "auto, fp8 or fp8_e4m3",
    "quantization": "fp8 for an unquantised checkpoint; else only the checkpoint's own method",
    "disable_log_stats": "False: for `LLM.get_metrics`; an `AsyncLLM` always has statistics",
    "profiler_config": "for `LLM.start_profile`: `profiler` torch, `torch_profiler_dir` and three switches",
    "structured_outputs_config": "the same; llguidance compiles grammars for any `backend`, with the whitespace of "
    "outlines for outlines",
    "load_format": "auto, hf and mistral (the same), safetensors, gguf or dummy",
    "logprobs_mode": "the same; the processed modes sample without CUDA graphs in steps that report edited logits",
    "max_model_len": "the same; auto or -1: what fits the memory",
}


def test_the_page_has_every_argument_and_what_it_does():
    page = PAGE.read_text().splitlines()
    missing = [row for row in constructor_rows() if row not in page]
    assert not missing, "\n".join(missing)
    listed = [line.split("`")[1] for line in page[page.index("## Constructor") :] if line.startswith("| `")]
    assert [name for name in listed if listed.count(name) > 1] == []


PAGE = Path(__file__).parents[1] / "docs" / "vllm.md"


def test_the_page_has_every_name_and_method():
    page = PAGE.read_text()
    own = {name for name in LISTED["names"] if f"`{name}`" in page}
    assert set(LISTED["names"]) == own
    for name in own - {"ModelRegistry", "initialize_ray_cluster"}:
        assert getattr(slipstream, name) is not None
    for name in LISTED["classes"]["LLM"]["methods"]:
        assert name == "__init__" or name in NOT_SUPPORTED or f"`LLM.{name}`" in page, name
    for name, reason in NOT_SUPPORTED.items():
        assert f"| `{name}` | refused: {reason} |" in page.splitlines()


def test_the_page_has_every_field_and_method_that_is_not_here():
    lines = PAGE.read_text().split("## Names that are not here")[1].split("##")[0].splitlines()
    listed = {
        row[1].strip(" `"): re.findall("`(.*?)`", row[2]) for row in (line.split("|") for line in lines) if row[2:]
    }
    missing = {}
    for kind, members in LISTED["classes"].items():
        names = dict.fromkeys([*members.get("fields", ()), *members.get("methods", ())])
        known = {*dir(getattr(slipstream, kind)), *getattr(getattr(slipstream, kind), "__dataclass_fields__", ())}
        missing[kind] = [name for name in names if not name.startswith("_") and name not in known]
    del missing["LLM"]  # its methods are walked above
    assert {kind: names for kind, names in missing.items() if names} == {
        kind: names for kind, names in listed.items() if kind in LISTED["classes"]
    }
