"""Builds a drafter that runs a model: its weights, its cache and its attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.base.errors import ModelError
from slipstream.config.config import EngineConfig
from slipstream.device.device import Device
from slipstream.nn.attention.choose import choose_attention
from slipstream.nn.models.attached_model import AttachedModel
from slipstream.nn.models.decoder import Decoder
from slipstream.nn.models.dflash import DFlashModel
from slipstream.nn.models.draft_head import DraftHead
from slipstream.nn.models.draft_layout import open_draft
from slipstream.runner.batch.page_tables import PageTables
from slipstream.runner.batch.rows import RowTable
from slipstream.runner.batch.token_history import TokenHistory
from slipstream.runner.drafts.block_drafter import BlockDrafter
from slipstream.runner.drafts.draft_cache import DraftCache, own_groups
from slipstream.runner.drafts.drafter import ForwardDrafter
from slipstream.runner.drafts.head_drafter import HeadDrafter
from slipstream.runner.drafts.model_drafter import ModelDrafter
from slipstream.runner.kv_store import KVStore, ScratchPages

Fill = Callable[[bool], None]
"""Reads the weights of a model; takes whether to show progress."""


def open_draft_model(
    config: EngineConfig, target: Decoder, device: Device, fill: Fill
) -> tuple[Decoder | AttachedModel | None, Fill]:
    """The model of the drafter with unfilled weights, None if there is none; and a function that calls `fill` and then
    reads these weights."""
    if config.draft is None:
        return None, fill
    try:
        model, fill_draft = open_draft(config.draft, target, device.torch_device)
    except ModelError as error:
        raise type(error)(f"the draft model of speculative_config: {error}") from error

    def fill_both(progress: bool) -> None:
        fill(progress)
        fill_draft(progress)

    return model, fill_both


def scratch_pages(config: EngineConfig) -> ScratchPages | None:
    drafts = config.scheduler.drafts
    if config.draft is None or drafts is None:
        return None
    num_pages = config.draft.scratch_pages(drafts.num_drafts, config.cache.page_size)
    return ScratchPages(config.draft.first_site, config.scheduler.max_num_seqs + 1, num_pages)


def build_drafter(
    config: EngineConfig,
    model: Decoder | AttachedModel,
    rows: RowTable,
    tables: PageTables,
    store: KVStore,
    history: TokenHistory,
) -> ForwardDrafter:
    assert config.draft is not None
    attention = choose_attention(
        store.device.torch_device,
        tuple(own_groups(store.groups, config.draft.first_site).values()),
        getattr(torch, config.draft.model.dtype),
        (),
        deterministic=config.model.deterministic,
    )
    draft_cache = DraftCache(store, tables, attention, config.scheduler.max_model_len)
    if isinstance(model, DraftHead):
        return HeadDrafter(model, rows, draft_cache)
    if isinstance(model, DFlashModel):
        return BlockDrafter(model, rows, draft_cache)
    assert isinstance(model, Decoder), f"no drafter runs {type(model).__name__}"
    return ModelDrafter(model, rows, draft_cache, history)
