"""Builds the device half from an EngineConfig: model, caches, row states and head."""

from __future__ import annotations

import torch

from slipstream.cache_spec import CacheSpec
from slipstream.config.config import EngineConfig
from slipstream.config.memory import ITEMSIZE, arena_bytes, result_bytes
from slipstream.config.model_info import ModelInfo
from slipstream.device.device import Device, open_device
from slipstream.nn.attention.choose import choose_attention
from slipstream.nn.models.load import load_model
from slipstream.nn.models.registry import cache_specs
from slipstream.runner.batch.input_batch import InputBatch
from slipstream.runner.batch.page_tables import PageTables
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.staging import HostRing
from slipstream.runner.generate import GenerateHead
from slipstream.runner.graphs import GraphPool
from slipstream.runner.kv_store import KVStore
from slipstream.runner.output import ResultRing
from slipstream.runner.runner import ModelRunner
from slipstream.runner.sampling.sampler import Sampler


def layer_specs(info: ModelInfo, page_size: int, dtype: str) -> list[CacheSpec]:
    """What each layer of the model asks to have remembered, before anything is loaded."""
    return cache_specs(info, page_size, ITEMSIZE[dtype])


def build_runner(config: EngineConfig, *, progress: bool = False, device: Device | None = None) -> ModelRunner:
    scheduler, cache = config.scheduler, config.cache
    if device is None:
        device = open_device(config.device.kind, scheduler.depth, config.device.num_threads)
    model = load_model(config.model, device.torch_device, progress)
    dtype = getattr(torch, config.model.dtype)
    logit_dtype = torch.float64 if dtype is torch.float64 else torch.float32

    num_rows = scheduler.max_num_seqs + 1  # the last is nobody's: padding points at it
    num_slots = scheduler.depth + 2
    rows = RowTable(num_rows, device)
    tables = PageTables(len(cache.groups), num_rows, scheduler.max_model_len, cache.page_size, device)
    store = KVStore(cache.groups, cache.group_pages, dtype, device)
    sampler = Sampler(num_rows, config.model.info.vocab_size, device, logit_dtype)
    graphs = GraphPool(device, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, eager=config.device.eager)
    results = ResultRing(num_slots, result_bytes(config), device)
    return ModelRunner(
        model=model,
        device=device,
        attention=choose_attention(
            device.torch_device,
            config.model.info,
            cache.page_size,
            dtype,
            windows=tuple(group.window for group in cache.groups),
            score_cap=model.shape.score_cap,
        ),
        store=store,
        rows=rows,
        input_batch=InputBatch(rows, tables),
        head=GenerateHead(model, rows, sampler, results, logit_dtype, graphs),
        row_states=(rows, tables, store, sampler),
        ring=HostRing(num_slots, arena_bytes(config), device),
        graphs=graphs,
    )
