"""EngineConfig: the configuration with every default applied. Frozen; no field means automatic."""

from __future__ import annotations

import msgspec

from slipstream.cache_spec import CacheGroup, StateSpec
from slipstream.config.adapter_config import AdapterConfig
from slipstream.config.draft_config import DRAFTS_PER_STEP, DraftConfig
from slipstream.config.model_info import ModelInfo
from slipstream.config.model_sizes import ModelSizes
from slipstream.config.pooling_info import PoolingInfo
from slipstream.config.quantization import Quantization
from slipstream.config.record_config import RecordConfig
from slipstream.config.transfer_config import TransferConfig

MAX_STEP_LOGPROBS = 2**20  # elements in the wide logprobs of one step, or in its prompt logprobs


class ModelConfig(msgspec.Struct, frozen=True):
    info: ModelInfo
    path: str  # a folder or a .gguf file on this machine
    name: str  # the name in results
    load_format: str  # safetensors, gguf or dummy
    dtype: str  # a torch dtype's name
    dequantize: bool | None  # None: GGUF files on a GPU
    max_model_len: int
    seed: int
    pooling: PoolingInfo | None = None  # how its hidden states become vectors and scores; None: it only generates
    keeps_bfloat16: bool = False  # bfloat16 weights may stay so in a float32 model: the user chose no dtype
    deterministic: bool = False  # a row's results are the same bits whatever is in its batch
    logprobs_mode: str = "raw_logprobs"  # the values that logprobs of drawn tokens have
    sizes: ModelSizes = ModelSizes()  # of a step's activations; only the memory estimate reads it
    quantization: Quantization | None = None  # of the weights; None: they have `dtype`, or the file is GGUF
    offload_bytes: int = 0  # of the device's memory that weights in host memory save; they are copied in every step
    sleep_mode: bool = False  # the memory of its weights can be released
    num_ranks: int = 1  # processes that have a part of the model each (tensor parallelism)
    rank: int = 0  # of this process
    by_expert: bool = False  # ranks have whole experts (expert parallelism), not a part of each
    num_engines: int = 1  # engines that have a part of the experts each (data and expert parallelism)
    engine: int = 0  # number of this engine among them

    @property
    def generates(self) -> bool:
        return self.pooling is None or self.pooling.generates


class DraftModelConfig(msgspec.Struct, frozen=True):
    """The model of a drafter."""

    method: str  # draft_model: a decoder; mtp: a layer of the engine's checkpoint; eagle, eagle3: a head; dflash
    model: ModelConfig
    first_site: int  # its cache sites follow those of the engine's model
    page_bytes: int  # of one page, over all its sites
    taps: tuple[int, ...] = ()  # layers of the engine's model whose inputs it reads

    @property
    def reads_hidden(self) -> bool:
        """Whether it drafts from hidden states of the engine's model."""
        return self.method != "draft_model"

    def of_length(self, max_model_len: int) -> DraftModelConfig:
        """The same for an engine of this length."""
        return msgspec.structs.replace(self, model=msgspec.structs.replace(self.model, max_model_len=max_model_len))

    def scratch_pages(self, num_drafts: int, page_size: int) -> int:
        """Pages of a row for the positions of its drafts, which have no page yet."""
        return -(-self.positions_of(num_drafts) // page_size)

    @property
    def drafts_in_blocks(self) -> bool:
        """Whether one pass makes all drafts."""
        return self.method == "dflash"

    @property
    def needs_next_token(self) -> bool:
        """Whether the entry of a position in its cache depends on the token after it."""
        return self.reads_hidden and not self.drafts_in_blocks

    def positions_of(self, num_drafts: int) -> int:
        """Positions of a row after the computed ones that its passes write. A block begins with the last token."""
        return num_drafts + 1 if self.drafts_in_blocks else num_drafts


class StateConfig(msgspec.Struct, frozen=True):
    """Recurrent states: one for each row and one for each checkpoint."""

    specs: tuple[StateSpec, ...]  # by state site
    num_checkpoints: int
    border: int  # checkpoints are taken at multiples of so many positions, which are whole pages
    spacing: int  # positions between checkpoints of a long prompt, far from its end

    @property
    def num_bytes(self) -> int:
        """Bytes of the state of one row, over all sites."""
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint, over all sites."""
        return sum(spec.checkpoint_bytes for spec in self.specs)


class CacheConfig(msgspec.Struct, frozen=True):
    page_size: int
    num_pages: int  # of a group that keeps every position, the null page included
    prefix_caching: bool
    groups: tuple[CacheGroup, ...]
    group_pages: tuple[int, ...]  # per group; groups with a window need fewer pages
    step_tokens: int  # maximum number of positions that one step adds
    states: StateConfig | None = None  # None: the model has no recurrent state
    # A prefix hit ends a page earlier than what is cached: a drafter's last entry of a page depends on the token after
    # it, which the page's hash does not cover, and on a hidden state that only computing the position gives.
    drops_last_page: bool = False
    tier_bytes: int = 0  # of host memory for pages that the device has no room for; 0: none
    is_mirrored: bool = False  # the device has a copy of that memory, which engines of the same host can open

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(group.bytes_per_page * num for group, num in zip(self.groups, self.group_pages, strict=True))


class SchedulerConfig(msgspec.Struct, frozen=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int
    chunked_prefill: bool
    depth: int
    seed: int
    staged_ints: int  # integers that the admissions of one step may upload: page-table entries, histories, ids
    max_step_logprobs: int = (
        MAX_STEP_LOGPROBS  # logprobs of one kind that one step may return, if some row requests many
    )
    is_encoder: bool = False  # prompts are computed in one step, and nothing is kept between steps
    max_itl: float | None = None  # bound of the seconds between two tokens that prefill may cause; None: no bound
    max_kept: int = 2**20  # tokens of queries that the device stores for late interaction
    cached_tasks: tuple[str, ...] = ()  # pooling tasks that need the last position only, so that prefixes may be cached
    short_rope: int | None = None  # longest request with LongRoPE's short factors; None: one set of factors
    drafts: DraftConfig | None = None  # None: every row draws one token per step
    prompt_embeds: bool = False  # requests may bring embeddings of their prompts
    drafts_per_step: int = DRAFTS_PER_STEP  # limit for all rows of one step: the device has a buffer for their logits

    @property
    def max_step_drafts(self) -> int:
        """Maximum number of drafts of all rows of one step."""
        if self.drafts is None:
            return 0
        most = min(self.max_num_seqs * self.drafts.num_drafts, self.drafts_per_step)
        return min(most, max(self.max_num_batched_tokens - self.max_num_seqs, 0))

    @property
    def max_drawn(self) -> int:
        """Maximum number of tokens that one step draws: one for each row, and one after each draft."""
        return self.max_num_seqs + self.max_step_drafts


class DeviceConfig(msgspec.Struct, frozen=True):
    kind: str  # cpu or cuda
    num_threads: int
    eager: bool
    # Bytes of device memory that the engine leaves free: the cache gets what is left when everything else has been
    # measured. None: the cache size was set, or computed from the free memory.
    keep_free: int | None = None
    gpu_memory_utilization: float = 0.9  # share of the device's memory that the engine may use
    sleep_mode: bool = False  # weights and caches are allocated so that their memory can be released


class EngineConfig(msgspec.Struct, frozen=True):
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
    draft: DraftModelConfig | None = None  # None: drafts need no model
    adapters: AdapterConfig | None = None  # None: requests have no LoRA adapters
    record: RecordConfig = RecordConfig()
    transfer: TransferConfig | None = None  # None: no pages are exchanged with other engines

    def of_rank(self, rank: int) -> EngineConfig:
        """The same for another rank of the model."""
        draft = self.draft
        if draft is not None:
            draft = msgspec.structs.replace(draft, model=msgspec.structs.replace(draft.model, rank=rank))
        return msgspec.structs.replace(self, model=msgspec.structs.replace(self.model, rank=rank), draft=draft)

    @property
    def hidden_width(self) -> int:
        """Elements that a forward returns per token: its hidden state, and what a drafter reads beside it."""
        return self.model.info.hidden_size * (1 + (0 if self.draft is None else len(self.draft.taps)))
