"""Checks of `tensor_parallel_size` and `enable_expert_parallel` against the other options: what several ranks cannot
run yet is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.config.config import EngineConfig
from slipstream.config.draft_config import WITH_MODEL, check_draft_ranks, read_draft_config
from slipstream.config.gpus import SHARE_VARIABLE, ranks_share_gpu, visible_gpus
from slipstream.config.options import Options
from slipstream.errors import InvalidOption

MAX_RANKS = 64


def check_rank_options(options: Options, device_kind: str) -> None:
    """Before anything of the model is read."""
    _check_expert_parallel(options, device_kind)
    count = options.tensor_parallel_size
    if not 1 <= count <= MAX_RANKS:
        raise InvalidOption(f"tensor_parallel_size is {count}; give 1 to {MAX_RANKS}")
    check_draft_ranks(options.speculative_config, count)
    if count == 1:
        return
    if options.deterministic:
        raise InvalidOption(
            f"tensor_parallel_size is {count}, and deterministic is set; the order of sums over ranks depends on the "
            "step: leave it out, or use tensor_parallel_size 1"
        )
    if device_kind == "cuda":
        _check_gpus(options, len(visible_gpus()))


def _check_gpus(options: Options, num_gpus: int) -> None:
    count = options.tensor_parallel_size
    if not ranks_share_gpu():
        if num_gpus < count and options.distributed_executor_backend != "ray":  # which gives each rank its GPU
            raise InvalidOption(
                f"tensor_parallel_size is {count}, and {num_gpus} GPUs are visible; each rank needs its own: lower "
                "tensor_parallel_size, or run on the CPU with device cpu"
            )
    else:
        _check_cache_size(options)


def _check_cache_size(options: Options) -> None:
    if options.num_pages is None and options.kv_cache_memory is None:
        raise InvalidOption(f"{SHARE_VARIABLE} is set, and ranks do not share the memory that is left; give num_pages")


def _check_expert_parallel(options: Options, device_kind: str) -> None:
    """The number of GPUs is checked by ReplicaProcesses."""
    count = options.data_parallel_size
    if not options.enable_expert_parallel or count == 1:
        return
    drafts = read_draft_config(options.speculative_config, options.drafts)
    by_model = drafts is not None and drafts.method in WITH_MODEL
    for is_there, what in (
        (options.tensor_parallel_size > 1, "tensor_parallel_size divides the engine as well: use 1"),
        (options.deterministic, "deterministic is set; experts of other engines are not batch-invariant: leave it out"),
        (by_model, "its engines draft without a model: use drafts by ngram or suffix"),
        (options.enable_lora, "adapters run in whole copies only: leave enable_lora out"),
    ):
        if is_there:
            raise InvalidOption(
                f"enable_expert_parallel is set with data_parallel_size {count}, and {what}, or leave "
                "enable_expert_parallel out to run whole copies"
            )
    if device_kind == "cuda" and ranks_share_gpu():
        _check_cache_size(options)


def check_rank_config(config: EngineConfig) -> None:
    """Checks the options of ranks once the model is known."""
    model = config.model
    if model.num_engines > 1 and not model.generates:
        raise InvalidOption(
            f"enable_expert_parallel is set with data_parallel_size {model.num_engines}, and {model.name} only pools; "
            "leave enable_expert_parallel out to run whole copies"
        )


def check_one_model(options: Sequence[Options]) -> None:
    """Several models of one engine run on one rank."""
    if len(options) > 1 and any(each.tensor_parallel_size > 1 for each in options):
        raise InvalidOption("tensor_parallel_size is given for one of several models; serve it alone, or use 1")
    if len(options) > 1 and any(each.enable_expert_parallel and each.data_parallel_size > 1 for each in options):
        raise InvalidOption(
            "enable_expert_parallel is given for one of several models; serve it alone, or leave it out"
        )
