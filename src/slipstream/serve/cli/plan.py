"""`slipstream plan`: shows the resolved configuration and its memory without loading the model."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.config.options import make_options
from slipstream.serve.bench.tables import stacked_bar
from slipstream.serve.cli.flags import add_engine_flags, check_paths, engine_options
from slipstream.serve.cli.run import OpenLLM

if TYPE_CHECKING:
    from slipstream.config.config import EngineConfig
    from slipstream.config.memory import MemoryEstimate

MIB = 2**20


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "plan",
        help="show the configuration and memory of a model",
        description="Shows the resolved value of every option on this machine, and the memory that the engine would "
        "use, without loading the model. Python and torch need a few hundred MiB of host memory in addition.",
        usage="slipstream plan [flags]",
        allow_abbrev=False,
    )
    command.add_argument("--json", action="store_true", help="print a JSON object, with sizes in bytes")
    add_engine_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    options = make_options(**engine_options(args))
    check_paths(options, look_up=True)
    from slipstream.engine.build import estimate_build  # imports torch, which --help and errors do not need

    config, memory = estimate_build(options)
    if args.json:
        print(json.dumps({"config": config_summary(config), "memory": memory_summary(memory)}))
    else:
        chosen = options.max_model_len in ("auto", -1)
        print_config(config, length_note="what fits into memory" if chosen else "")
        print()
        print_memory(config, memory)
    return 0


def config_summary(config: EngineConfig) -> dict[str, Any]:
    scheduler, cache, model = config.scheduler, config.cache, config.model
    return {
        "model": model.name,
        "architecture": model.info.architecture,
        "load_format": model.load_format,
        "device": config.device.kind,
        "num_threads": config.device.num_threads,
        "dtype": model.dtype,
        "max_model_len": scheduler.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "page_size": cache.page_size,
        "num_pages": cache.num_pages - 1,
        **({} if cache.states is None else {"num_checkpoints": cache.states.num_checkpoints}),
        "prefix_caching": cache.prefix_caching,
        "chunked_prefill": scheduler.chunked_prefill,
        "depth": scheduler.depth,
    }


def memory_summary(memory: MemoryEstimate) -> dict[str, int | dict[str, int]]:
    summary: dict[str, int | dict[str, int]] = msgspec.to_builtins(memory)
    return summary | {"activations": memory.activations, "parts": memory.parts, "total": memory.total}


def print_config(config: EngineConfig, length_note: str) -> None:
    notes = {
        "max_model_len": length_note or f"the model was trained for {config.model.info.max_positions}",
        "num_pages": f"{(config.cache.num_pages - 1) * config.cache.page_size} positions for all requests together",
        "num_checkpoints": "recurrent states kept for prefix caching",
        "depth": "synchronous" if config.scheduler.depth == 0 else "steps launched ahead",
    }
    for name, value in config_summary(config).items():
        shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        print(f"{name:<24}{shown!s:<12}{notes.get(name, '')}".rstrip())


def print_memory(config: EngineConfig, memory: MemoryEstimate) -> None:
    scheduler = config.scheduler
    body = memory.hidden + memory.attention
    pages = f"{config.cache.num_pages} pages, one of them the null page"
    if config.device.keep_free is not None:
        pages = f"an estimate: set after the rest is measured, so that {_mib(config.device.keep_free)} stay free"
    grown, head = "growth of results of token tasks", "pooled results"
    features = "late-interaction queries kept for their documents"
    if config.model.generates:
        grown = "growth for logprobs of the whole vocabulary, and for lists of token ids and bad words"
        head = f"logits of {scheduler.max_drawn} drawn tokens, with every sampling feature in use"
        features = "penalties and biases, if every row uses them; none if no row does"
    rows = [
        ("weights", memory.weights, f"{_weight_kind(config)}, with the rope table"),
        *_adapter_rows(config, memory),
        ("cache", memory.cache, pages),
        *_tier_rows(memory),
        *_state_rows(config, memory),
        ("tables", memory.tables, f"page tables and state of {scheduler.max_num_seqs} rows"),
        ("features", memory.features, features),
        (
            "staging",
            memory.staging + memory.staging_host,
            f"{scheduler.depth + 2} pinned buffers and an arena on the device",
        ),
        ("masks", memory.masks + memory.masks_host, "of structured output and processors: pinned buffers and copies"),
        ("results", memory.results + memory.results_host, f"{scheduler.depth + 2} buffers on host and device"),
        ("result growth", memory.result_growth + memory.result_growth_host, grown),
        ("activations", memory.activations, "of the largest step: the larger of layers and head, and tokens"),
        ("  body", body, f"{scheduler.max_num_batched_tokens} tokens; {_mib(memory.attention)} of it for attention"),
        ("  head", memory.logits, head),
        ("  tokens", memory.unread, "in addition, in steps with results per token"),
        ("graphs", memory.graphs, "memory of captured steps"),
        ("total", memory.total, "upper bound"),
    ]
    if not memory.graphs:
        rows = [row for row in rows if row[0] != "graphs"]
    print(f"{'memory':<16}{'MiB':>10}")
    for name, num_bytes, note in rows:
        print(f"{name:<16}{num_bytes / MIB:>10.1f}  {note}")
    parts = [(name, num_bytes) for name, num_bytes, _ in rows if name != "total" and not name.startswith(" ")]
    line, legend = stacked_bar(parts)
    print(f"{'shares':<18}{line}\n{'':<18}{legend}")


def _state_rows(config: EngineConfig, memory: MemoryEstimate) -> list[tuple[str, int, str]]:
    states = config.cache.states
    if states is None:
        return []
    return [
        ("states", memory.states, f"recurrent states of {config.scheduler.max_num_seqs} rows and the padding row"),
        ("checkpoints", memory.checkpoints, f"{states.num_checkpoints} recurrent states, kept for prefix caching"),
    ]


def _tier_rows(memory: MemoryEstimate) -> list[tuple[str, int, str]]:
    if not memory.tier_host:
        return []
    of_device = "a copy of them on the device" if memory.mirror else "buffers on the device to copy them"
    return [("second tier", memory.tier + memory.mirror + memory.tier_host, f"pinned pages, and {of_device}")]


def _weight_kind(config: EngineConfig) -> str:
    from slipstream.nn.load import stays_low_bit  # imports torch, which is loaded already

    low_bit = stays_low_bit(config.model, config.device.kind)
    return f"quantised as in the file, the rest {config.model.dtype}" if low_bit else config.model.dtype


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"


def _adapter_rows(config: EngineConfig, memory: MemoryEstimate) -> list[tuple[str, int, str]]:
    if (adapters := config.adapters) is None:
        return []
    note = f"{adapters.max_loras} on the device, {adapters.max_cpu_loras} in host memory, rank {adapters.max_lora_rank}"
    return [("adapters", memory.adapters + memory.adapters_host, note)]
