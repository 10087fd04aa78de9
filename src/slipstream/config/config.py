"""EngineConfig: what the engine knows once every default is settled. Frozen; no field means auto."""

from __future__ import annotations

import msgspec

from slipstream.cache_spec import CacheGroup
from slipstream.config.model_info import ModelInfo
from slipstream.config.model_sizes import ModelSizes
from slipstream.config.pooling_info import PoolingInfo

MAX_REPORTED_LOGPROBS = 2**20  # numbers in one step's long reports, or in what it tells of prompts


class ModelConfig(msgspec.Struct, frozen=True):
    info: ModelInfo
    path: str  # a folder or a .gguf file on this machine
    name: str  # what results call it
    load_format: str  # safetensors, gguf or dummy
    dtype: str  # a torch dtype's name
    dequantize: bool
    max_model_len: int
    seed: int
    pooling: PoolingInfo | None = None  # how its hidden states become vectors and scores; None: it only generates
    deterministic: bool = False  # a row's numbers are the same bits whatever runs beside it
    sizes: ModelSizes = ModelSizes()  # of a step's activations; only the memory plan reads it

    @property
    def generates(self) -> bool:
        return self.pooling is None or self.pooling.generates


class CacheConfig(msgspec.Struct, frozen=True):
    page_size: int
    num_pages: int  # of a group that keeps every position, the null page counted
    prefix_caching: bool
    groups: tuple[CacheGroup, ...]
    group_pages: tuple[int, ...]  # of each group: those with a window need fewer
    step_tokens: int  # the most positions that one step adds

    @property
    def num_bytes(self) -> int:
        return sum(group.bytes_per_page * num for group, num in zip(self.groups, self.group_pages, strict=True))


class SchedulerConfig(msgspec.Struct, frozen=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int
    chunked_prefill: bool
    depth: int
    seed: int
    staged_ints: int  # what one step's admissions may stage: page places and histories, in 4-byte numbers
    max_reported: int = (
        MAX_REPORTED_LOGPROBS  # logprobs of one kind that one step may report, where some row wants very many
    )
    is_encoder: bool = False  # prompts are computed whole, and nothing is kept of them between steps
    max_itl: float | None = None  # seconds between tokens that prompts may cost those who read theirs; None: no bound
    max_kept: int = 2**20  # tokens of queries that the device keeps for documents to come
    cached_tasks: tuple[str, ...] = ()  # pooling whose result needs no position but the last
    short_rope: int | None = None  # longest request with LongRoPE's short factors; None: one set of factors for all


class DeviceConfig(msgspec.Struct, frozen=True):
    kind: str  # cpu or cuda
    num_threads: int
    eager: bool
    # bytes of the device's memory that the engine leaves alone: the cache is sized by what is left when everything
    # else has been measured. None: its size was given, or settled from what was free
    keep_free: int | None = None


class EngineConfig(msgspec.Struct, frozen=True):
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
