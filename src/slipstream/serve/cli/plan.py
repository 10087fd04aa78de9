"""`slipstream plan`: the settled configuration and its memory, to the MiB, before anything is loaded."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.config.options import make_options
from slipstream.serve.cli.flags import add_engine_flags, engine_options
from slipstream.serve.cli.paths import check_paths
from slipstream.serve.cli.run import OpenLLM

if TYPE_CHECKING:
    from slipstream.config.config import EngineConfig
    from slipstream.config.memory import MemoryPlan

MIB = 2**20


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "plan",
        help="show the configuration and memory a model would get",
        description="Shows what every default comes to on this machine, and the memory the engine would take, without "
        "loading the model. Python and torch come on top, with a few hundred MiB of the host's memory.",
        usage="slipstream plan [flags]",
        allow_abbrev=False,
    )
    command.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    add_engine_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    options = make_options(**engine_options(args))
    check_paths(options, look_up=True)
    from slipstream.engine.build import foresee  # brings torch, which help and a mistaken flag need not wait for

    config, memory = foresee(options)
    if args.json:
        print(json.dumps({"config": config_facts(config), "memory": memory_facts(memory)}))
    else:
        chosen = options.max_model_len in ("auto", -1)
        print_config(config, length_note="what fits the memory" if chosen else "")
        print()
        print_memory(config, memory)
    return 0


def config_facts(config: EngineConfig) -> dict[str, Any]:
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
        "prefix_caching": cache.prefix_caching,
        "chunked_prefill": scheduler.chunked_prefill,
        "depth": scheduler.depth,
    }


def memory_facts(memory: MemoryPlan) -> dict[str, int]:
    facts: dict[str, int] = msgspec.to_builtins(memory)
    return facts | {"activations": memory.activations, "total": memory.total}


def print_config(config: EngineConfig, length_note: str) -> None:
    notes = {
        "max_model_len": length_note or f"the model was made for {config.model.info.max_positions}",
        "num_pages": f"{(config.cache.num_pages - 1) * config.cache.page_size} positions for all requests together",
        "depth": "synchronous" if config.scheduler.depth == 0 else "steps launched ahead",
    }
    for name, value in config_facts(config).items():
        shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        print(f"{name:<24}{shown!s:<12}{notes.get(name, '')}".rstrip())


def print_memory(config: EngineConfig, memory: MemoryPlan) -> None:
    scheduler = config.scheduler
    body = memory.hidden + memory.attention
    pages = f"{config.cache.num_pages} pages, one of them the null page"
    if config.device.keep_free is not None:
        pages = f"about: settled when the rest was measured, so that {_mib(config.device.keep_free)} stay free"
    grown, head = "what results of tokens take more", "to pooled results"
    features = "queries kept for documents to come"
    if config.model.generates:
        grown = "what whole vocabularies of logprobs take more, and ids given for them, to stop at, or as bad words"
        head = f"logits of {scheduler.max_num_seqs} rows, every sampling feature in use"
        features = "penalties and biases, when every row asks for them; nothing when none does"
    rows = [
        ("weights", memory.weights, f"{_weight_kind(config)}, rope table included"),
        ("cache", memory.cache, pages),
        ("tables", memory.tables, f"of {scheduler.max_num_seqs} rows"),
        ("features", memory.features, features),
        ("staging", memory.staging + memory.staging_host, f"{scheduler.depth + 2} slots of the host and an arena"),
        ("results", memory.results + memory.results_host, f"{scheduler.depth + 2} slots on each side"),
        ("reports", memory.reports + memory.reports_host, grown),
        ("activations", memory.activations, "of the largest step: the larger of the next two, and what follows them"),
        ("  body", body, f"{scheduler.max_num_batched_tokens} tokens; {_mib(memory.attention)} of it attention's own"),
        ("  head", memory.logits, head),
        ("  tokens", memory.unread, "more in steps that tell of each token"),
        ("graphs", memory.graphs, "captured steps work in memory of their own"),
        ("total", memory.total, "at most"),
    ]
    if not memory.graphs:
        rows = [row for row in rows if row[0] != "graphs"]
    print(f"{'memory':<16}{'MiB':>10}")
    for name, num_bytes, note in rows:
        print(f"{name:<16}{num_bytes / MIB:>10.1f}  {note}")


def _weight_kind(config: EngineConfig) -> str:
    from slipstream.nn.models.load import stays_low_bit  # brings torch, which is here by now

    low_bit = stays_low_bit(config.model, config.device.kind)
    return f"low-bit as in the file, the rest {config.model.dtype}" if low_bit else config.model.dtype


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
