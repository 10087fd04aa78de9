"""From options to a running core: find the model, settle the configuration, build both halves."""

from __future__ import annotations

import msgspec

from slipstream.config.config import EngineConfig
from slipstream.config.generation import EMBEDDED_DEFAULTS, GenerationDefaults, read_generation_defaults
from slipstream.config.gguf_file import GgufFile
from slipstream.config.gguf_info import gguf_model_info
from slipstream.config.locate import LocatedModel, locate
from slipstream.config.memory import MemoryPlan, plan_memory
from slipstream.config.model_info import ModelInfo, read_model_info
from slipstream.config.options import Options
from slipstream.config.resolve import Source, model_config, resolve, resolve_dtype
from slipstream.device.device import Device, device_facts
from slipstream.engine.core import EngineCore
from slipstream.engine.inputs import InputProcessor
from slipstream.nn.models.measure import weight_bytes
from slipstream.runner.assemble import build_runner, layer_specs
from slipstream.scheduler.cache.layout import group_layers
from slipstream.text.chat import load_chat_template
from slipstream.text.tokenizer import Tokenizer


class Built(msgspec.Struct, frozen=True):
    """A core and what a front end needs to talk to it."""

    config: EngineConfig
    core: EngineCore
    inputs: InputProcessor
    tokenizer: Tokenizer | None


def build(options: Options, *, progress: bool = False, device: Device | None = None) -> Built:
    located = locate(options.model, options.revision)
    # as long as it is open here, all that ask for it get this one, and its header is read once
    open_file = GgufFile.open(located.path) if located.kind == "gguf" else None
    info, defaults = _read(located)
    config = settle(options, located, info)
    tokenizer = None if options.skip_tokenizer_init else _load_tokenizer(options, located)
    core = EngineCore(config, build_runner(config, progress=progress, device=device))
    del open_file
    inputs = InputProcessor(
        tokenizer,
        defaults,
        config.scheduler.max_model_len,
        info.vocab_size,
        config.model.name,
        info.max_positions,
    )
    return Built(config, core, inputs, tokenizer)


def _read(located: LocatedModel) -> tuple[ModelInfo, GenerationDefaults]:
    if located.kind == "gguf":
        defaults = EMBEDDED_DEFAULTS if located.embedded else GenerationDefaults()
        return gguf_model_info(GgufFile.open(located.path)), defaults
    info = read_model_info(located.path)
    defaults = read_generation_defaults(located.path)
    if defaults.eos_token_ids:
        ends = dict.fromkeys((*info.eos_token_ids, *defaults.eos_token_ids))
        info = msgspec.structs.replace(info, eos_token_ids=tuple(ends))
    return info, defaults


def _load_tokenizer(options: Options, located: LocatedModel) -> Tokenizer:
    tokenizer = Tokenizer.load(options.tokenizer or located.path)
    if options.chat_template is not None:
        tokenizer.chat_templates = {"default": load_chat_template(options.chat_template)}
    return tokenizer


def settle(options: Options, located: LocatedModel, info: ModelInfo) -> EngineConfig:
    """The configuration an engine with these options would have on this machine."""
    machine = device_facts(options.device)
    dtype = resolve_dtype(options, info, machine)
    groups = group_layers(layer_specs(info, options.page_size, dtype))
    source = Source(str(located.path), located.kind, located.name, 0)
    # at the model's full length: the length itself is settled from what the weights leave
    num_bytes = weight_bytes(model_config(options, info, source, dtype, info.max_positions), machine.kind)
    return resolve(options, info, msgspec.structs.replace(source, num_bytes=num_bytes), groups, dtype, machine)


def foresee(options: Options) -> tuple[EngineConfig, MemoryPlan]:
    """What `build` would settle on and the memory it would take. Nothing is loaded."""
    located = locate(options.model, options.revision)
    info, _ = _read(located)
    config = settle(options, located, info)
    return config, plan_memory(config, weight_bytes(config.model, config.device.kind))
