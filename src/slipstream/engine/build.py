"""From options to a running core: find the model, settle the configuration, build both halves."""

from __future__ import annotations

import msgspec

from slipstream.config.config import EngineConfig
from slipstream.config.generation import EMBEDDED_DEFAULTS, GenerationDefaults, read_generation_defaults
from slipstream.config.gguf_file import GgufFile
from slipstream.config.gguf_info import gguf_model_info
from slipstream.config.locate import LocatedModel, locate
from slipstream.config.model_info import ModelInfo, read_model_info
from slipstream.config.options import Options
from slipstream.config.resolve import ITEMSIZE, Source, resolve, resolve_dtype
from slipstream.device.device import Device, device_facts
from slipstream.engine.core import EngineCore
from slipstream.engine.inputs import InputProcessor
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
    info, defaults = _read(located)
    config = settle(options, located, info)
    tokenizer = None if options.skip_tokenizer_init else _load_tokenizer(options, located)
    core = EngineCore(config, build_runner(config, progress=progress, device=device))
    inputs = InputProcessor(tokenizer, defaults, config.scheduler.max_model_len, info.vocab_size, config.model.name)
    return Built(config, core, inputs, tokenizer)


def _read(located: LocatedModel) -> tuple[ModelInfo, GenerationDefaults]:
    if located.kind == "gguf":
        defaults = EMBEDDED_DEFAULTS if located.embedded else GenerationDefaults()
        return gguf_model_info(GgufFile(located.path)), defaults
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
    source = Source(str(located.path), located.kind, located.name, _weight_bytes(info, dtype))
    return resolve(options, info, source, groups, dtype, machine)


def _weight_bytes(info: ModelInfo, dtype: str) -> int:
    """Of the whole model once loaded."""
    attention = info.hidden_size * info.head_dim * 2 * (info.num_heads + info.num_kv_heads)
    ffn = 3 * info.hidden_size * info.ffn_size
    embeddings = info.vocab_size * info.hidden_size * (1 if info.tied_embeddings else 2)
    return (info.num_layers * (attention + ffn) + embeddings) * ITEMSIZE[dtype]
