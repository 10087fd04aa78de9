"""Starts the device half: loads the model, assembles the runner, compiles kernels, sizes the cache, captures steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec
import torch

from slipstream.base.host import num_cpus
from slipstream.config.buffer_size import arena_bytes, pooled_bytes, result_bytes, result_growth_bytes
from slipstream.config.cache_size import fit_cache
from slipstream.config.config import EngineConfig
from slipstream.config.memory import LOGITS_AT_ONCE, WORKSPACE, estimate_memory, graph_output_bytes
from slipstream.device.collectives import DryGroup, Group
from slipstream.device.device import Device, open_device
from slipstream.nn.adapters import AdapterLayout
from slipstream.nn.decoder import Decoder
from slipstream.nn.drafters.draft_head import DraftHead
from slipstream.nn.layers.layer import connect_ranks
from slipstream.nn.load import open_model
from slipstream.nn.registry import find_rules
from slipstream.nn.sdpa import choose_attention
from slipstream.nn.shapes import bidirectional_head_dims
from slipstream.nn.weights.weight_format import Weight
from slipstream.ops.gemm.linear import reserve_counters
from slipstream.ops.gemm.linear.cublaslt import Choices, RecordedGemms, autotune_recorded, recording_gemms
from slipstream.ops.platform.compile_ahead import ForkedCompiler, can_compile_ahead, compiling_ahead
from slipstream.params.pooling import PoolingParams
from slipstream.runner.drafter import Drafter, NgramDrafter
from slipstream.runner.features import StepFeature
from slipstream.runner.generate_head import GenerateHead
from slipstream.runner.graphs import GraphPool
from slipstream.runner.image_rows import ImageRows
from slipstream.runner.input_batch import BatchInputs, EmbedUploads, InputBatch, RopeRows
from slipstream.runner.lora_store import AdapterStore
from slipstream.runner.model_drafter import build_drafter, open_draft_model, scratch_pages
from slipstream.runner.page_tier import PageTier
from slipstream.runner.pool_head import EncoderBatch, PoolHead
from slipstream.runner.pool_tokens import ChunkState
from slipstream.runner.results import HeadMaker, ResultRing
from slipstream.runner.rows import PageTables, RowTable, SittingRows, TokenHistory
from slipstream.runner.runner import ModelRunner
from slipstream.runner.sampling.sampler import Sampler
from slipstream.runner.staging import HostRing
from slipstream.runner.stores import KVStore, StateStore
from slipstream.runner.warmup import PoolWarmUp, Start, WarmUp, enough_memory

Join = Callable[[torch.device], Group]
"""Waits until all ranks of a model have loaded, and returns their group."""


def build_runner(
    config: EngineConfig, *, progress: bool = False, device: Device | None = None, join: Join | None = None
) -> tuple[ModelRunner, EngineConfig]:
    """The runner, ready to run, and the configuration with the size of cache that was found to fit. `join`: for a model
    with several ranks."""
    if device is None:
        device = open_device(config.device.kind, config.scheduler.depth, config.device.num_threads)
    pools = device.enable_sleep() if config.device.sleep_mode else None
    model, fill = open_model(config.model, device.torch_device, None if pools is None else pools.weights.empty)
    draft_model, fill = open_draft_model(config, model, device, fill)
    warms_up = device.warms_up
    measured = warms_up and config.device.keep_free is not None and not config.scheduler.is_encoder
    group_pages = (1,) * len(config.cache.groups) if measured else config.cache.group_pages
    runner = assemble(config, device, model, group_pages, draft_model)
    if not warms_up:
        _take_tier(runner, config)
        fill(progress)
        if join is not None:
            _connect(runner, config, draft_model, join(device.torch_device))
        return runner, config
    if join is not None:
        _connect(runner, config, draft_model, DryGroup(config.model.num_ranks * config.model.num_engines))
    if any(isinstance(part, Weight) and part.allocates_when_filled for part in model.modules()):
        fill(progress)  # a dry run needs the tensors of the weights
        fill = _do_nothing
    warm_up = _warm_up(runner, config)
    device.compute.run(lambda: reserve_counters(device.torch_device))
    if config.model.generates:
        with enough_memory():
            device.compute.run(lambda: _take_logits(config, device))
    # zeros and weights are written on the default stream, steps run on another: wait for the former
    device.wait_until_idle()
    with recording_gemms() as products, _dry_running(warm_up) as compiler:
        fill(progress)
        device.wait_until_idle()
        group = None if join is None else join(device.torch_device)  # after all forks
        if group is not None:
            _connect(runner, config, draft_model, group)
        with enough_memory():
            device.compute.run(lambda: _autotune(products, group))
        if measured:  # the dry run has allocated what the largest step needs
            room = _room(config, device)
            if group is not None and config.model.num_ranks > 1:  # engines that share experts have caches of their own
                room = min(group.share("room", room))
            config = fit_cache(config, room)
            runner.store.take_memory(config.cache.group_pages)
            device.wait_until_idle()
        _take_tier(runner, config)
        if compiler is not None:
            # the last one is most likely attention for chunks, which decode steps do not need; if it is another kernel,
            # the capture that needs it compiles it
            compiler.finish(max_left=1 if config.model.generates else 0)
        with runner.graphs.starting(), enough_memory():
            runner.graphs.take(estimate_memory(config, 0).graphs - WORKSPACE)
        warm_up.capture()
    warm_up.run_largest()
    return runner, config


def _take_tier(runner: ModelRunner, config: EngineConfig) -> None:
    """Allocate the second tier, once the cache has its size."""
    tier = runner.find(PageTier)
    if tier is not None:
        tier.take_memory(config.cache)


def _connect(runner: ModelRunner, config: EngineConfig, draft_model: torch.nn.Module | None, group: Group) -> None:
    connect_ranks(runner.model, group)
    if draft_model is not None:
        connect_ranks(draft_model, group)
    sampler = runner.find(Sampler)
    if sampler is not None and config.model.num_ranks > 1:  # engines that share experts draw for themselves
        sampler.connect_ranks(group)


def _autotune(products: RecordedGemms, group: Group | None) -> None:
    """Device: time the algorithms of GEMMs. Ranks take the choices of rank 0: products that every rank computes whole
    must have the same bits on all of them."""
    name = "gemms"
    if group is None or group.rank == 0:
        chosen = autotune_recorded(products)
        if group is not None:
            group.send(name, msgspec.msgpack.encode(chosen))
    else:
        autotune_recorded(products, msgspec.msgpack.decode(group.receive(name), type=Choices))


def _do_nothing(progress: bool) -> None:
    """The weights have been read."""


@contextlib.contextmanager
def _dry_running(warm_up: Start) -> Iterator[ForkedCompiler | None]:
    """Compile the kernels that the dry run uses, while the `with` block runs, where that is supported."""
    if can_compile_ahead():
        with compiling_ahead(warm_up.dry_run, num_cpus()) as compiler:
            yield compiler
    else:
        warm_up.dry_run()
        yield None


def _take_logits(config: EngineConfig, device: Device) -> None:
    """Device: allocate and drop the memory of a step with sampling features that the dry run does not use, with the
    maximum number of drawn tokens. The allocator keeps it, in pieces that fit any such step."""
    shape = (config.scheduler.max_drawn, config.model.info.vocab_size)
    [torch.empty(shape, dtype=torch.float32, device=device.torch_device) for _ in range(LOGITS_AT_ONCE)]


def _warm_up(runner: ModelRunner, config: EngineConfig) -> Start:
    scheduler, num_groups, pooling = config.scheduler, len(config.cache.groups), config.model.pooling
    if config.model.generates:
        return WarmUp(
            runner,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            scheduler.max_model_len,
            num_groups,
            scheduler.drafts.num_drafts if scheduler.drafts is not None else 0,
            returns_drafts=scheduler.drafts is not None and scheduler.drafts.searches,
            joint=config.model.num_engines > 1,
        )
    assert pooling is not None, "a model generates or pools"
    return PoolWarmUp(runner, scheduler, PoolingParams(task=pooling.tasks[0]), num_groups)


def _room(config: EngineConfig, device: Device) -> int:
    """Bytes left for the cache after the dry run of the largest step, less what is computed to be allocated later."""
    free, keep_free = device.free_memory(), config.device.keep_free
    assert free is not None and keep_free is not None
    return free - keep_free - estimate_memory(config, 0).later


# Assembles the runner from an EngineConfig: caches, row states, heads and what they share. No device work.


def assemble(
    config: EngineConfig,
    device: Device,
    model: Decoder,
    group_pages: tuple[int, ...],
    draft_model: Decoder | DraftHead | None,
) -> ModelRunner:
    scheduler, cache = config.scheduler, config.cache
    dtype = getattr(torch, config.model.dtype)
    logit_dtype = torch.float64 if dtype is torch.float64 else torch.float32

    num_rows = scheduler.max_num_seqs + 1  # the last is the padding row
    num_buffers = scheduler.depth + 2
    drafts = scheduler.drafts
    max_drafts = 0 if drafts is None else drafts.num_drafts
    tables = PageTables(len(cache.groups), num_rows, scheduler.max_model_len, cache.page_size, device)
    adapters = _adapter_store(config, model, device)
    history = None if drafts is None else TokenHistory(cache.groups, tables, device)
    store = KVStore(cache.groups, group_pages, device, history, scratch_pages(config))
    states = None if cache.states is None else StateStore(cache.states, num_rows, device, max_drafts)
    graphs = _graph_pool(config, device)
    info, pooling = config.model.info, config.model.pooling
    result_size = result_bytes(config) + pooled_bytes(config)
    results = ResultRing(num_buffers, result_size, device, max_capacity=result_size + result_growth_bytes(config))
    ring = HostRing(num_buffers, arena_bytes(config), device)
    heads: list[HeadMaker] = []
    features: list[StepFeature] = []  # in the order of a step
    if cache.tier_bytes:  # its copies come before all other work
        serves_pages = config.transfer is not None and config.transfer.listen is not None
        features.append(PageTier(store, cache, num_buffers, device, states, is_shared=serves_pages))
    features += [store] if states is None else [store, states]
    features += [] if adapters is None else [adapters]
    input_batch: BatchInputs
    if scheduler.is_encoder:
        input_batch = _encoder_batch(config, device)
    else:
        rows = RowTable(num_rows, device, max_drafts)
        input_batch = InputBatch(rows, tables, history)
        features += [rows, tables]
        if scheduler.short_rope is not None:
            features.append(RopeRows(num_rows, scheduler.max_model_len, device))
        features += [] if history is None else [history]
        features += [EmbedUploads()] if scheduler.prompt_embeds else []
        if config.images is not None and model.tower is not None:
            head_dim = model.tower.shape.attention.head_dim
            attention = choose_attention(device.torch_device, (), dtype, (head_dim,), config.model.deterministic)
            features.append(ImageRows(config.images, model.tower, attention, num_rows, dtype, device))
        if config.model.generates:
            sampler = Sampler(
                num_rows,
                info.vocab_size,
                device,
                logit_dtype,
                scheduler.max_step_logprobs,
                max_drafts,
                scheduler.max_step_drafts,
                config.model.logprobs_mode,
                graphs,
            )
            drafter: Drafter | None = None
            if draft_model is not None and history is not None:
                drafter = build_drafter(config, draft_model, rows, tables, store, history)
                features.append(drafter)
            elif drafts is not None and history is not None:
                drafter = NgramDrafter(drafts, rows, history)
            heads.append(
                GenerateHead(
                    model,
                    rows,
                    sampler,
                    results,
                    logit_dtype,
                    graphs,
                    batch_invariant=config.model.deterministic,
                    drafter=drafter,
                    max_length=scheduler.max_model_len,
                    adapters=adapters,
                )
            )
            features += [sampler, SittingRows(rows, num_buffers, device, ring)]
    if pooling is not None:
        chunks = ChunkState(pooling.methods, 0 if scheduler.is_encoder else num_rows, info.hidden_size, dtype, device)
        own_size = None if config.hidden_width == info.hidden_size else info.hidden_size
        pool = PoolHead(model.heads, pooling, info.vocab_size, chunks, results, graphs, logit_dtype, own_size)
        heads.append(pool)
        features.append(pool)
    return ModelRunner(
        model=model,
        attention=choose_attention(
            device.torch_device,
            cache.groups,
            dtype,
            bidirectional_head_dims(model.shape.layers),
            deterministic=config.model.deterministic,
        ),
        store=store,
        input_batch=input_batch,
        features=features,
        heads=heads,
        ring=ring,
        results=results,
        graphs=graphs,
    )


def _graph_pool(config: EngineConfig, device: Device) -> GraphPool:
    scheduler = config.scheduler
    # a step has at most as many tokens as its rows can have
    max_tokens = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * scheduler.max_model_len)
    return GraphPool(
        device,
        scheduler.max_drawn,
        max_tokens,
        eager=config.device.eager,
        output_bytes=graph_output_bytes(config),
        max_num_seqs=scheduler.max_num_seqs,
    )


def _adapter_store(config: EngineConfig, model: Decoder, device: Device) -> AdapterStore | None:
    if config.adapters is None:
        return None
    layout = AdapterLayout(model, config.adapters.max_lora_rank, generates=config.model.generates)
    rules, dtype = find_rules(config.model.info, model.shape), getattr(torch, config.model.dtype)
    return AdapterStore(config.adapters, layout, rules, dtype, device)


def _encoder_batch(config: EngineConfig, device: Device) -> EncoderBatch:
    scheduler, pooling = config.scheduler, config.model.pooling
    assert pooling is not None, "a model without a cache is for pooling"
    return EncoderBatch(
        device,
        with_types=pooling.has_types,
        with_unseen=not pooling.query.filler_is_seen,
        short_rope=None if scheduler.short_rope is None else (scheduler.short_rope, scheduler.max_model_len),
    )
