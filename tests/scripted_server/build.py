"""Cores with a scripted device, for tests of server processes that need no model: a start takes neither torch nor
weights. A step takes some milliseconds, as one of a small model does."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripted_engine import ScriptedDevice, scripted_core
from slipstream.checkpoint.generation import GenerationDefaults
from slipstream.config.options import Options
from slipstream.engine.lanes import Lanes
from slipstream.engine.model_description import ModelDescription

MAX_LEN = 131072
STEP_SECONDS = 0.004
HOLD = "hold"  # a file of the model's folder: a core starts when it is gone


class PacedDevice(ScriptedDevice):
    def run(self) -> None:
        time.sleep(STEP_SECONDS)
        super().run()


def open_models(options: Sequence[Options], engine: int = 0) -> list[Any]:
    assert not gc.isenabled(), "objects of a model are permanent: see gc_freeze.py"
    while any(Path(str(each.model), HOLD).exists() for each in options):
        time.sleep(0.01)
    return [SimpleNamespace(description=_describe(each)) for each in options]


def _describe(options: Options) -> ModelDescription:
    assert options.model is not None
    return ModelDescription(
        name=Path(options.model).name,
        tokenizer=options.model,
        chat_template=None,
        defaults=GenerationDefaults(params={}),
        max_model_len=options.max_model_len if isinstance(options.max_model_len, int) else MAX_LEN,
        max_positions=MAX_LEN,
        vocab_size=304,
        max_waiting=options.max_waiting,
    )


def build_lanes(
    options: Sequence[Options], opened: Sequence[Any], *, on_load: Callable[[str], None], **alone: None
) -> tuple[Lanes, dict[str, Any]]:
    cores = {}
    for model, each in zip(options, opened, strict=True):
        on_load(each.description.name)
        rows = model.max_num_seqs or 32
        core = scripted_core(
            1, page_size=16, num_pages=16384, max_num_seqs=rows, max_num_batched_tokens=512, max_model_len=MAX_LEN,
            max_waiting=model.max_waiting,
        )  # fmt: skip
        core.executor = PacedDevice(16, rows)
        cores[each.description.name] = core
    return Lanes(cores), {}
