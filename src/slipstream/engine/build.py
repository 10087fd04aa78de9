"""From options to a running core: locates the model, resolves the configuration, builds scheduler and runner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.base.errors import BadCheckpoint, InvalidOption, UnsupportedModel, naming_model
from slipstream.base.files import load_json
from slipstream.checkpoint.architecture import find_architecture
from slipstream.checkpoint.generation import (
    EMBEDDED_DEFAULTS,
    GenerationDefaults,
    override_fields,
    read_generation_defaults,
)
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.gguf_info import gguf_model_info
from slipstream.checkpoint.image_info import ImageInfo, SmartSize, read_image_info
from slipstream.checkpoint.locate import LocatedModel, locate, require_weights
from slipstream.checkpoint.model_info import ModelInfo, check_info, read_model_info
from slipstream.checkpoint.sentence_modules import static_folder
from slipstream.config.adapter_config import read_adapter_config
from slipstream.config.cache_size import DEFAULT_SHARE, too_large
from slipstream.config.checks import (
    check_cache_dtype,
    check_head_dtype,
    check_offload,
    check_one_model,
    check_rank_config,
    check_rank_options,
    check_sleep_mode,
    check_tier,
    resolve_cache_dtype,
)
from slipstream.config.config import EngineConfig, ImageConfig, read_draft_config
from slipstream.config.memory import MemoryEstimate, estimate_memory
from slipstream.config.options import Options
from slipstream.config.read_pooling import read_pooling
from slipstream.config.resolve import Source, fewer_rows, model_config, resolve, resolve_dtype
from slipstream.device.device import Device, detect_machine, engine_state, open_device, seems_cuda
from slipstream.engine.core import EngineCore
from slipstream.engine.draft_model import settle_draft
from slipstream.engine.lanes import Lanes
from slipstream.engine.model_description import ModelDescription
from slipstream.handoff.client import Handoff
from slipstream.nn.adapters import measure_adapter
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.drafters.draft_layout import draft_weight_bytes
from slipstream.nn.encoder import EncoderShape
from slipstream.nn.load import as_stored, weight_bytes, with_stored_width
from slipstream.nn.registry import find_family, has_family
from slipstream.nn.sharding import find_local_shape
from slipstream.nn.towers.families import find_tower
from slipstream.nn.update import ModelWeights
from slipstream.ops.platform.compile_ahead import start_triton
from slipstream.params.processors import LogitsProcessor
from slipstream.ranks.link import RankLink
from slipstream.ranks.start import build_ranks
from slipstream.record.recorder import Recorder
from slipstream.runner.page_tier import PageTier
from slipstream.runner.sampling.sampler import Sampler
from slipstream.scheduler.adapters import Adapters
from slipstream.scheduler.cache.pages import group_sites
from slipstream.scheduler.grammar.constraints import Constraints
from slipstream.scheduler.grammar.grammars import Grammars
from slipstream.scheduler.request_processors import find_classes, make_processors

log = logging.getLogger(__name__)


class Opened(msgspec.Struct, frozen=True):
    """A model that is located and configured; nothing is loaded yet."""

    config: EngineConfig
    num_bytes: int  # of the weights, once loaded
    description: ModelDescription
    processors: tuple[type[LogitsProcessor], ...]  # logits processors of the engine
    file: GgufFile | None  # kept open, so that every later open reuses it and its header is read once


def open_model(options: Options) -> Opened:
    if seems_cuda(options.device):
        start_triton()  # in the background: it takes as long as all of this
    located = locate(options.model, options.revision, options.task, options.download_dir)
    with naming_model(located.path):
        return _open(options, located)


def _open(options: Options, located: LocatedModel) -> Opened:
    file = GgufFile.open(located.path) if located.kind == "gguf" else None
    if file is None and options.load_format != "dummy":
        require_weights(located.path)  # first: without weights nothing else is worth reporting
    info, defaults = _read(options, located)
    config, num_bytes = settle(options, located, info)
    if options.logits_processors and not config.model.generates:
        raise InvalidOption(
            f"Pooling models do not support custom logits processors. {config.model.name} does not generate; leave "
            "logits_processors out"
        )
    processors = find_classes(options.logits_processors or ()) if config.model.generates else ()
    reason = why_no_images(options, located, info)
    description = ModelDescription.of(options, config, defaults, reason or max_images(options))
    return Opened(config, num_bytes, description, processors, file)


def build_core(
    opened: Opened,
    *,
    progress: bool = False,
    device: Device | None = None,
    folder: Path | None = None,
    link: RankLink | None = None,
) -> EngineCore:
    """Loads the weights. `folder`: of the engines that share the experts, see `SharedExperts`. `link`: where ranks of
    other nodes connect; None: they are started here."""
    half = build_ranks(opened.config, link, progress=progress, device=device, folder=folder)
    runner, config = half.runner, half.config
    has_one_rank = config.model.num_ranks == config.model.num_engines == 1
    constraints = None
    if config.model.generates:
        grammars = Grammars(opened.description.load_tokenizer, config.model.info.vocab_size)
        engine = make_processors(
            opened.processors, config, runner.device.torch_device, is_pin_memory=runner.device.can_pin
        )
        # masks for several ranks are sent, or wait for other engines: they are not written to the buffer of a step
        sampler = runner.find(Sampler)
        open_masks = sampler.open_masks if sampler is not None and has_one_rank else None
        constraints = Constraints(grammars, config.scheduler.max_num_seqs, engine, open_masks)
    adapters = None
    if config.adapters is not None and half.adapters is not None:
        adapters = Adapters[Any](config.adapters, half.adapters, config.scheduler.max_num_seqs)
    recorder = Recorder(half.executor, config) if config.record.num_steps else None
    weights = None
    if has_one_rank:
        model: Any = runner.model
        weights = ModelWeights(config.model, model, runner.device)
    core = EngineCore(config, half.executor, constraints, adapters, recorder, weights, half.peers, half.tier)
    core.memory = estimate_memory(config, opened.num_bytes).parts
    memory_tier = runner.find(PageTier)
    if config.transfer is not None and memory_tier is not None and (cache := core.scheduler.cache) is not None:
        assert (tier := cache.tier) is not None, "engines that exchange pages have a second tier"
        core.join_handoff(Handoff(config, config.transfer, tier, memory_tier, half.movers, half.secret))
    return core


@engine_state()
def build_lanes(
    options: Sequence[Options],
    opened: Sequence[Opened],
    *,
    progress: bool = False,
    device: Device | None = None,
    on_load: Callable[[str], None] = lambda name: None,
    folder: Path | None = None,
    link: RankLink | None = None,
) -> tuple[Lanes, dict[str, Opened]]:
    """Models on one device, and their descriptions by name. `opened`: the result of `open_models` for the same options.
    `on_load` is called with the name of each model before it is loaded. `folder`, `link`: as for `build_core`.

    Models without a cache come first and take what they need. The others share evenly what is left of the GPU up to
    `gpu_memory_utilization`, except those whose options set the size of their cache.
    """
    names = [each.description.name for each in opened]
    kinds = {each.config.device.kind for each in opened}
    if len(kinds) > 1:
        asked = " and ".join(sorted(kinds))
        raise InvalidOption(f"models of one engine share a device, and these ask for {asked}; give all the same")
    first = opened[0].config
    check_sleep_mode([each.config for each in opened])
    if device is None:
        depth = max(each.config.scheduler.depth for each in opened)
        device = open_device(first.device.kind, depth, first.device.num_threads)
    order = sorted(range(len(opened)), key=lambda index: not opened[index].config.scheduler.is_encoder)
    with_cache = [index for index in order if not opened[index].config.scheduler.is_encoder]
    built: dict[str, tuple[Opened, EngineCore]] = {}
    try:
        for index in order:
            on_load(names[index])
            own = options[index]
            if index in with_cache and first.device.kind == "cuda":
                share = (own.gpu_memory_utilization or DEFAULT_SHARE) * (with_cache.index(index) + 1) / len(with_cache)
                own = msgspec.structs.replace(own, gpu_memory_utilization=share)
            # configured again: the models before it have taken their memory
            settled = opened[index] if len(opened) == 1 else open_model(own)
            built[names[index]] = (
                settled,
                build_core(settled, progress=progress, device=device, folder=folder, link=link),
            )
    except BaseException:
        device.close()
        raise
    lanes = Lanes({name: built[name][1] for name in names}, None if device.pools is None else device)
    lanes.thread_state, lanes.enter_thread = device.engine_state, device.enter_thread
    return lanes, {name: built[name][0] for name in names}


@engine_state()
def open_models(options: Sequence[Options], engine: int = 0) -> list[Opened]:
    """`engine`: number of this engine among those that share experts."""
    check_one_model(options)
    opened = [open_model(each) for each in options]
    if engine:
        opened = [_of_engine(each, engine) for each in opened]
    names = [each.description.name for each in opened]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidOption(f"two models are called {twice}; give one another name")
    return opened


def _of_engine(opened: Opened, engine: int) -> Opened:
    model = msgspec.structs.replace(opened.config.model, engine=engine)
    return msgspec.structs.replace(opened, config=msgspec.structs.replace(opened.config, model=model))


def _read(options: Options, located: LocatedModel) -> tuple[ModelInfo, GenerationDefaults]:
    changes = override_fields("hf_overrides", options.hf_overrides)
    sampling = override_fields("override_generation_config", options.override_generation_config)
    if located.kind == "gguf":
        if changes:
            raise InvalidOption("hf_overrides are for a folder with config.json, and this is a .gguf file; remove them")
        source, file = options.generation_config, GgufFile.open(located.path)
        defaults = read_generation_defaults(located.path, source, sampling, file.fields)
        if located.embedded and source == "auto":
            defaults = GenerationDefaults(EMBEDDED_DEFAULTS.params | defaults.params)
        return check_info(gguf_model_info(file)), defaults
    info = read_info(options, located.path, changes)
    defaults = read_generation_defaults(located.path, options.generation_config, sampling)
    if defaults.eos_token_ids:
        info = msgspec.structs.replace(info, eos_token_ids=defaults.eos_token_ids)
    info = check_info(info)
    return (info if options.load_format == "dummy" else as_stored(info, located.path)), defaults


def settle(options: Options, located: LocatedModel, info: ModelInfo) -> tuple[EngineConfig, int]:
    """The configuration of an engine with these options on this machine, and the bytes of its weights at the model's
    full length."""
    options = for_backend(options, info)
    machine = detect_machine(options.device)
    check_rank_options(options, machine.kind)
    dtype = resolve_dtype(options, info, machine)
    pooling, info = read_pooling(options, info, located.path)
    check_head_dtype(info, pooling, dtype)
    if options.load_format != "dummy":
        pooling = with_stored_width(pooling, info, Path(located.path))
    shape = find_local_shape(  # the parts of all ranks have the same sizes
        info,
        0,
        options.tensor_parallel_size,
        by_expert=options.enable_expert_parallel,
        num_engines=options.data_parallel_size if options.enable_expert_parallel else 1,
    )
    check_offload(options, info, machine.kind, is_encoder=isinstance(shape, EncoderShape))
    check_prompt_embeds(options, shape)
    cache_dtype = resolve_cache_dtype(options.kv_cache_dtype, dtype)
    specs = shape.cache_specs(options.page_size, cache_dtype)
    check_cache_dtype(cache_dtype, specs)
    draft, draft_specs = settle_draft(
        options, located, info, specs, dtype, cache_dtype, on_cpu=machine.kind == "cpu"
    ) or (None, [])
    groups = group_sites([*specs, *draft_specs])
    sizes = shape.sizes(machine.kind == "cpu")
    images = None
    if reason := why_no_images(options, located, info):
        if options.mm_processor_kwargs:
            raise InvalidOption(f"mm_processor_kwargs is for images, and {reason}; remove it")
    else:
        images = image_info(options, located)
    tower = None if images is None else image_config(info, images, on_cpu=machine.kind == "cpu")
    source = Source(str(located.path), located.kind, located.name, 0, sizes, images, tower)
    # at the model's full length: the actual length depends on what the weights leave
    num_bytes = weight_bytes(model_config(options, info, source, dtype, info.max_positions, pooling), machine.kind)
    num_bytes += 0 if draft is None else draft_weight_bytes(draft, info, machine.kind)
    source = msgspec.structs.replace(source, num_bytes=num_bytes)
    drafts = read_draft_config(options.speculative_config, options.drafts)
    num_drafts = 0 if drafts is None else drafts.num_drafts
    states = tuple(shape.state_specs(dtype, num_drafts, on_cpu=machine.kind == "cpu"))
    adapters = read_adapter_config(
        options,
        lambda rank: measure_adapter(
            model_config(options, info, source, dtype, info.max_positions, pooling), rank, machine.kind
        ),
    )
    config = resolve(options, info, source, groups, dtype, machine, pooling, states, draft, adapters)
    check_tier(config, options.data_parallel_size)
    check_rank_config(config)
    notes = (fewer_rows(config) if options.max_num_seqs is None else "", too_large(config, num_bytes, machine))
    for note in filter(None, notes):
        log.warning(note)
    return config, num_bytes


def estimate_build(options: Options) -> tuple[EngineConfig, MemoryEstimate]:
    """The configuration that `build` would choose, and its memory. Nothing is loaded."""
    located = locate(options.model, options.revision, options.task, options.download_dir)
    info, _ = _read(options, located)
    config, _ = settle(options, located, info)
    num_bytes = weight_bytes(config.model, config.device.kind)
    num_bytes += 0 if config.draft is None else draft_weight_bytes(config.draft, info, config.device.kind)
    return config, estimate_memory(config, num_bytes)


# Which code runs a model: a family of this package, or the module of the transformers library.


def read_info(options: Options, folder: Path, changes: Mapping[str, Any]) -> ModelInfo:
    """The ModelInfo of a folder, for the implementation that `model_impl` selects. `changes`: of config.json."""
    if options.model_impl == "transformers":
        return _backend_info(folder, changes)
    if options.model_impl == "auto" and not _has_own_family(folder):
        try:
            info = _backend_info(folder, changes)
        except UnsupportedModel as reason:
            try:
                find_family(read_model_info(folder, dict(changes)))
            except UnsupportedModel as error:
                raise UnsupportedModel(f"{error}; and {reason}") from None
            raise
        log.warning("%s", describe_backend(info))
        return info
    return read_model_info(folder, dict(changes))


def _has_own_family(folder: Path) -> bool:
    """True as well for a config.json that cannot be read, which is reported where it is read."""
    if static_folder(folder) is not None:
        return True
    try:
        config = load_json(folder / "config.json")
        return not isinstance(config, dict) or has_family(find_architecture(config))
    except UnsupportedModel:
        return False
    except (OSError, ValueError):
        return True


def _backend_info(folder: Path, changes: Mapping[str, Any]) -> ModelInfo:
    from slipstream.nn.transformers_modules import transformers_info  # the library is optional

    if changes:
        raise InvalidOption("hf_overrides are for families of our own, and transformers' module runs this model")
    return transformers_info(str(folder))


def describe_backend(info: ModelInfo) -> str:
    """A line for the log: how transformers' module runs, and what a family of our own would do faster."""
    fact = f"{info.architecture} has no family of our own: transformers' module runs it, with our attention"
    faster = "a family of our own would have fused norms and GEMMs"
    if not info.backend_waits:
        return f"{fact}, in CUDA graphs on a GPU; {faster}"
    waits = ", ".join(info.backend_waits[:3]) + (" and others" if len(info.backend_waits) > 3 else "")
    return f"{fact}, launched kernel by kernel: it waits for the device at {waits}; {faster}, and CUDA graphs"


def for_backend(options: Options, info: ModelInfo) -> Options:
    """Options with what transformers' module needs. Raises InvalidOption for what it cannot do."""
    if not info.backend_folder:
        return options
    if options.deterministic:
        raise InvalidOption(
            f"deterministic is set, and {info.architecture} runs by transformers' module, whose GEMMs depend on the "
            "batch; leave it out"
        )
    if options.quantization is not None:
        raise InvalidOption(
            f"quantization is {options.quantization!r}, and {info.architecture} runs by transformers' module, whose "
            "weights are not quantised; leave it out"
        )
    return msgspec.structs.replace(options, enforce_eager=options.enforce_eager or bool(info.backend_waits))


# Which images a model takes.

SLOT_ROWS = 32  # of the arena of images: larger slots waste rows, smaller ones cost the host time
MAX_IMAGES = 16  # of a prompt, unless limit_mm_per_prompt says another number


def image_info(options: Options, located: LocatedModel) -> ImageInfo | None:
    return read_image_info(located.path, override_fields("mm_processor_kwargs", options.mm_processor_kwargs))


def why_no_images(options: Options, located: LocatedModel, info: ModelInfo) -> str:
    """The reason why an engine with these options takes no images; empty: it takes some."""
    if located.kind != "folder" or info.backend_folder or not isinstance(info.extra.get("vision_config"), dict):
        return "the model reads text only"
    if not max_images(options):
        return "limit_mm_per_prompt allows none"
    others = {
        "tensor_parallel_size": options.tensor_parallel_size > 1,
        "enable_expert_parallel": options.enable_expert_parallel,
        "enable_lora": options.enable_lora,
        "speculative_config": options.speculative_config is not None or options.drafts is not None,
        "enable_prompt_embeds": options.enable_prompt_embeds,
        "kv_transfer_config": options.kv_transfer_config is not None,
        "cpu_offload_gb": options.cpu_offload_gb > 0,
        "quantization": options.quantization is not None or info.quantization is not None,
        "enable_sleep_mode": options.enable_sleep_mode,
        "a pooling task": options.task not in ("auto", "generate"),
    }
    if found := [name for name, is_set in others.items() if is_set]:
        return f"images do not run with {found[0]} yet"
    if not options.enable_chunked_prefill:
        return "images need chunked prefill, and enable_chunked_prefill is off"
    try:
        images = image_info(options, located)
        if images is None:
            return "the model reads text only"
        rule = images.prompt
        is_plain = (
            rule is not None and rule.placeholder == rule.token and not (rule.start or rule.end or rule.row_break)
        )
        if not isinstance(images.size, SmartSize) or images.attention != "causal" or not is_plain:
            return f"of the family {images.family} the text part runs"
        find_tower(info, images)
    except UnsupportedModel as error:
        return str(error)
    except BadCheckpoint as error:
        log.warning("%s; only the text part is loaded", error)
        return str(error)
    return ""


def max_images(options: Options) -> int:
    """Of a prompt."""
    limits = override_fields("limit_mm_per_prompt", options.limit_mm_per_prompt)
    unknown = sorted(limits.keys() - {"image", "video", "audio"})
    found = limits.get("image", MAX_IMAGES)
    if isinstance(found, dict):
        found = found.get("count", MAX_IMAGES)
    if unknown or isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise InvalidOption(f'limit_mm_per_prompt is {dict(limits)!r:.100}; give the number of images, {{"image": 4}}')
    return found


def image_config(info: ModelInfo, images: ImageInfo, *, on_cpu: bool) -> ImageConfig:
    """At any length: see `ImageConfig.fitted`."""
    shape, _ = find_tower(info, images)
    assert isinstance(images.size, SmartSize), "other sizes are refused"
    return ImageConfig(
        num_slots=0,
        slot_rows=SLOT_ROWS,
        row_size=shape.num_levels * shape.output_size,
        step_patches=0,
        max_patches=images.size.most // images.patch**2,
        patch_bytes=3 * images.patch**2,
        patch_values=shape.patch.num_values,
        hidden_size=shape.hidden_size,
        sizes=shape.sizes(on_cpu),
        patches_per_token=images.merge**2,
        has_parts=images.mrope,
    )


# Checks that a model can take the embeddings of a prompt instead of its token ids.


def check_prompt_embeds(options: Options, shape: DecoderShape | EncoderShape) -> None:
    """Raises InvalidOption if enable_prompt_embeds is set and the model or another option needs token ids."""
    if not options.enable_prompt_embeds:
        return
    if isinstance(shape, EncoderShape):
        raise InvalidOption("enable_prompt_embeds is for decoders, and the model is an encoder; remove it")
    if shape.layer_inputs is not None:
        raise InvalidOption(
            "enable_prompt_embeds: the layers of this model look up inputs of their own by token id; remove it"
        )
    if options.speculative_config is not None or options.drafts is not None:
        raise InvalidOption(
            "enable_prompt_embeds: drafts are made of the prompt's token ids; remove speculative_config"
        )
    if options.tensor_parallel_size > 1:
        raise InvalidOption("enable_prompt_embeds is for one rank; set tensor_parallel_size to 1")
