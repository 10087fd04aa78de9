"""Assembles the runner from an EngineConfig: caches, row states, heads and what they share. No device work."""

from __future__ import annotations

import torch

from slipstream.config.buffer_size import arena_bytes, pooled_bytes, result_bytes, result_growth_bytes
from slipstream.config.config import EngineConfig
from slipstream.config.memory import graph_output_bytes
from slipstream.device.device import Device
from slipstream.nn.attention.choose import choose_attention
from slipstream.nn.models.adapter_layout import AdapterLayout
from slipstream.nn.models.decoder import Decoder
from slipstream.nn.models.draft_head import DraftHead
from slipstream.nn.models.registry import find_rules
from slipstream.nn.shapes import bidirectional_head_dims
from slipstream.runner.batch.encoder_batch import EncoderBatch
from slipstream.runner.batch.input_batch import BatchInputs, InputBatch
from slipstream.runner.batch.page_tables import PageTables
from slipstream.runner.batch.rope_rows import RopeRows
from slipstream.runner.batch.row_state import RowState
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.sit_out import SittingRows
from slipstream.runner.batch.staging import HostRing
from slipstream.runner.batch.token_history import TokenHistory
from slipstream.runner.drafts.build import build_drafter, scratch_pages
from slipstream.runner.drafts.drafter import Drafter
from slipstream.runner.drafts.ngram import NgramDrafter
from slipstream.runner.generate_head import GenerateHead
from slipstream.runner.graphs import GraphPool
from slipstream.runner.head import HeadMaker
from slipstream.runner.kv_store import KVStore
from slipstream.runner.lora.store import AdapterStore
from slipstream.runner.page_tier import PageTier
from slipstream.runner.pool_head import PoolHead
from slipstream.runner.pooling.chunk_state import ChunkState
from slipstream.runner.results import ResultRing
from slipstream.runner.runner import ModelRunner
from slipstream.runner.sampling.sampler import Sampler
from slipstream.runner.state_store import StateStore


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
    heads: list[HeadMaker] = []
    # copies of the second tier come before all other work of a step
    tier = None
    if cache.tier_bytes:
        serves_pages = config.transfer is not None and config.transfer.listen is not None
        tier = PageTier(store, cache, num_buffers, device, states, is_shared=serves_pages)
    row_states: list[RowState] = [] if tier is None else [tier]
    row_states += [store] if states is None else [store, states]
    sampler = draft_runner = sitting = None
    input_batch: BatchInputs
    if scheduler.is_encoder:
        input_batch = _encoder_batch(config, device)
    else:
        rows = RowTable(num_rows, device, max_drafts)
        rope_rows = None if scheduler.short_rope is None else RopeRows(num_rows, scheduler.max_model_len, device)
        input_batch = InputBatch(rows, tables, rope_rows, history)
        row_states += [rows, tables] if rope_rows is None else [rows, tables, rope_rows]
        row_states += [] if history is None else [history]
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
            )
            drafter: Drafter | None = None
            if draft_model is not None and history is not None:
                drafter = draft_runner = build_drafter(config, draft_model, rows, tables, store, history)
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
            row_states.append(sampler)
            sitting = SittingRows(rows, num_buffers, device)
    if pooling is not None:
        chunks = ChunkState(pooling.methods, 0 if scheduler.is_encoder else num_rows, info.hidden_size, dtype, device)
        own_size = None if config.hidden_width == info.hidden_size else info.hidden_size
        pool = PoolHead(model.heads, pooling, info.vocab_size, chunks, results, graphs, logit_dtype, own_size)
        heads.append(pool)
        row_states.append(pool)
    return ModelRunner(
        model=model,
        device=device,
        attention=choose_attention(
            device.torch_device,
            cache.groups,
            dtype,
            bidirectional_head_dims(model.shape.layers),
            deterministic=config.model.deterministic,
        ),
        store=store,
        input_batch=input_batch,
        heads=heads,
        row_states=row_states,
        ring=HostRing(num_buffers, arena_bytes(config), device),
        results=results,
        graphs=graphs,
        states=states,
        sampler=sampler,
        drafter=draft_runner,
        adapters=adapters,
        tier=tier,
        sitting=sitting,
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
