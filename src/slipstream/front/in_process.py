"""Builds the engine core and the models' front ends in one process."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.base.errors import InvalidOption
from slipstream.config.config import EngineConfig
from slipstream.config.options import Options
from slipstream.device.device import Device
from slipstream.engine.build import build_lanes, open_models
from slipstream.engine.lanes import Lanes
from slipstream.front.served import ServedModel
from slipstream.transport.replicas import has_replicas


def build_served(
    options: Sequence[Options], *, progress: bool = False, device: Device | None = None
) -> tuple[Lanes, dict[str, ServedModel]]:
    """Returns the lanes of all models, and each model by name. Tokenizers load first, because weights take longer."""
    if has_replicas(options):
        raise InvalidOption(
            f"data_parallel_size is {options[0].data_parallel_size} and distributed_executor_backend "
            f"{options[0].distributed_executor_backend}, and this process builds one core; replicas are started by LLM "
            "and by slipstream serve: use these, or 1 without ray"
        )
    opened = open_models(options)
    tokenizers = {each.description.name: each.description.load_tokenizer() for each in opened}
    lanes, settled = build_lanes(options, opened, progress=progress, device=device)
    for name, core in lanes.cores.items():
        if core.constraints is not None:
            core.constraints.grammars.use(tokenizers[name])
    return lanes, {name: ServedModel.of(each.description, tokenizers[name]) for name, each in settled.items()}


def configs(options: Sequence[Options]) -> dict[str, EngineConfig]:
    """The configuration of each model, by name. Nothing is loaded."""
    return {each.description.name: each.config for each in open_models(options)}
