"""Command-line flags of EngineArgs, for scripts that make their own parser (`EngineArgs.add_cli_args`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

from slipstream.config.options import Options

SHORT = {
    "tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep", "decode_context_parallel_size": "-dcp", "prefill_context_parallel_size": "-pcp",
    "data_parallel_rank": "-dpn", "data_parallel_start_rank": "-dpr", "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa", "data_parallel_rpc_port": "-dpp", "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph", "data_parallel_external_lb": "-dpe",
    "data_parallel_multi_port_external_lb": "-dpm", "nnodes": "-n", "node_rank": "-r", "quantization": "-q",
    "speculative_config": "-sc", "diffusion_config": "-dc", "compilation_config": "-cc", "attention_config": "-ac",
}  # fmt: skip
"""Short flags of vLLM, by argument."""


def add_engine_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Adds a flag for each argument; None is the default of each. A value is text or JSON, by the option's type."""
    group = parser.add_argument_group("engine arguments")
    kinds = {name: set(get_args(hint)) or {hint} for name, hint in get_type_hints(Options).items()}
    for name in names:
        flags, kind = _spellings(name), kinds.get(name, {Any})
        if bool in kind and kind <= {bool, type(None)}:
            group.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, default=None)
        elif kind <= {str, type(None)}:
            group.add_argument(*flags, dest=name, default=None)
        else:  # without a value it is a switch
            group.add_argument(*flags, dest=name, nargs="?", const=True, type=_value, default=None)


def _spellings(name: str) -> list[str]:
    flags = [f"--{name.replace('_', '-')}"]
    flags += [f"--{name}"] if "_" in name else []
    return [*flags, SHORT[name]] if name in SHORT else flags


def _value(text: str) -> Any:
    """Numbers, booleans, objects and lists of JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
