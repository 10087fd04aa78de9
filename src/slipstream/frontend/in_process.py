"""Builds the engine core and the models' front ends in one process."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.config.options import Options
from slipstream.device.device import Device
from slipstream.engine.build import build_lanes, open_models
from slipstream.engine.lanes import Lanes
from slipstream.frontend.served import ServedModel


def build_served(
    options: Sequence[Options], *, progress: bool = False, device: Device | None = None
) -> tuple[Lanes, dict[str, ServedModel]]:
    """Returns the lanes of all models, and each model by name. Tokenizers load first, because weights take longer."""
    opened = open_models(options)
    tokenizers = {each.description.name: each.description.load_tokenizer() for each in opened}
    lanes, settled = build_lanes(options, opened, progress=progress, device=device)
    for name, core in lanes.cores.items():
        if core.constraints is not None:
            core.constraints.grammars.use(tokenizers[name])
    return lanes, {name: ServedModel.of(each.description, tokenizers[name]) for name, each in settled.items()}
