"""EngineConfig: the configuration with every default applied. Frozen; no field means automatic."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.checkpoint.image_info import ImageInfo
from slipstream.checkpoint.model_info import ModelInfo, ModelSizes
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.checkpoint.quantization import Quantization
from slipstream.config.adapter_config import AdapterConfig
from slipstream.config.options import Options
from slipstream.contracts.cache_spec import CacheGroup, StateSpec

# RecordConfig: the settings of the flight recorder, and their checks.

MAX_STEPS = 1 << 20


class RecordConfig(msgspec.Struct, frozen=True):
    num_steps: int = 256  # kept in memory; 0: nothing is recorded
    folder: str | None = None  # of the files written after a failure; None: a folder of this user for temporary files
    redact: bool = False  # files have no token ids and no text of requests
    every_mb: int = 0  # a file is written each time so many megabytes were recorded; 0: only after a failure


def resolve_record(options: Options) -> RecordConfig:
    if not 0 <= options.record_steps <= MAX_STEPS:
        raise InvalidOption(
            f"record_steps is {options.record_steps}; give a number from 0 (nothing is recorded) to {MAX_STEPS}"
        )
    every = options.record_every_mb
    if every < 0 or (every and not options.record_steps):
        fact = "below 0" if every < 0 else "set, and record_steps is 0"
        raise InvalidOption(f"record_every_mb is {every}, {fact}; give a number of megabytes, and record_steps above 0")
    if not options.record_steps and (options.record_dir is not None or options.record_redact):
        name = "record_redact" if options.record_dir is None else "record_dir"
        raise InvalidOption(f"{name} is given and record_steps is 0, so nothing is recorded; remove one of them")
    return RecordConfig(options.record_steps, options.record_dir, options.record_redact, every)


# TransferConfig: hand-off of KV cache pages between engines (vLLM's `kv_transfer_config`), and its checks.
#
# A producer computes prompts and serves the pages of its second cache tier to others. A consumer asks its peers for
# pages that it does not have, and computes what they do not send in time.

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
"""Names of `slipstream serve --role`, and vLLM's."""

DEFAULT_PORT = 14579
DEFAULT_BUFFER = 10**9
"""Bytes of host memory for pages, if kv_offloading_size is not given; vLLM's default too."""

_FIELDS = (
    "kv_role",
    "kv_ip",
    "kv_port",
    "kv_peers",
    "kv_buffer_size",
    "kv_timeout",
    "kv_connector",
    "kv_connector_extra_config",
)


class TransferConfig(msgspec.Struct, frozen=True):
    listen: tuple[str, int] | None = None  # host and port at which pages are served; None: a consumer
    peers: tuple[tuple[str, int], ...] = ()  # that are asked for pages
    timeout: float = 5.0  # seconds that a request waits for pages of peers
    buffer_bytes: int = DEFAULT_BUFFER
    cuda_ipc: bool = False  # pages pass from device to device where the peer has it too and is on the same host


def read_transfer_config(given: Mapping[str, Any] | str | None, own_role: str | None = None) -> TransferConfig | None:
    """From the option, an object or its JSON. `own_role`: a name of ROLES, instead of the object's."""
    if not given and own_role is None:
        return None
    given = given or {}
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise InvalidOption(f"kv_transfer_config is not JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise InvalidOption('kv_transfer_config is no object; give one like {"kv_role": "kv_producer"}')
    for name in given:
        if name not in _FIELDS:
            raise InvalidOption(f"kv_transfer_config has no field {name!r:.50} here; it has {', '.join(_FIELDS)}")
    if given.get("kv_connector") is not None:
        raise InvalidOption(
            f"kv_connector is {given['kv_connector']!r:.50}; pages are sent over TCP by the engine itself: remove it"
        )
    role = given.get("kv_role", own_role and ROLES[own_role])
    if own_role is not None and role != ROLES[own_role]:
        raise InvalidOption(f"role is {own_role} and kv_role {role!r:.50}; remove one of them")
    if role not in ROLES.values():
        raise InvalidOption(f"kv_role is {role!r:.50}; give {', '.join(ROLES.values())}")
    host, port = given.get("kv_ip", "127.0.0.1"), given.get("kv_port", DEFAULT_PORT)
    if not isinstance(host, str) or type(port) is not int or not 0 <= port < 65536:
        raise InvalidOption(f"kv_ip is {host!r:.50} and kv_port {port!r:.50}; give a host and a port up to 65535")
    own = (host, port)
    listens = role != "kv_consumer"
    peers = given.get("kv_peers", [] if listens else [f"{host}:{port}"])
    if not isinstance(peers, list) or (peers and role == "kv_producer"):
        raise InvalidOption("kv_peers is a list of host:port, of a kv_consumer or kv_both")
    timeout, size = given.get("kv_timeout", 5.0), given.get("kv_buffer_size", DEFAULT_BUFFER)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 600:
        raise InvalidOption(f"kv_timeout is {timeout!r:.50}; give seconds, up to 600")
    if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
        raise InvalidOption(f"kv_buffer_size is {size!r:.50}; give bytes of host memory")
    by_device = _reads_devices(given.get("kv_connector_extra_config"))
    return TransferConfig(own if listens else None, tuple(map(_peer, peers)), float(timeout), int(size), by_device)


def _reads_devices(given: object) -> bool:
    """The field cuda_ipc of kv_connector_extra_config, its only one."""
    if given is None:
        return False
    if not isinstance(given, Mapping) or given.keys() - {"cuda_ipc"} or type(given.get("cuda_ipc", False)) is not bool:
        raise InvalidOption(f'kv_connector_extra_config is {given!r:.100}; it may be {{"cuda_ipc": true}}')
    return bool(given.get("cuda_ipc", False))


def _peer(text: object) -> tuple[str, int]:
    host, _, port = str(text).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidOption(f"a peer is {text!r:.100}; give host:port")
    return host.strip("[]"), int(port)


# DraftConfig: how tokens are drafted, read from `speculative_config`, which has vLLM's names.

MAX_DRAFTS = 16
"""Maximum number of drafts per row and step."""
MAX_MATCH = 64
"""Maximum number of tokens that a match compares."""
DRAFTS_PER_STEP = 256
"""Drafts of all rows of one step that every device has memory for."""
DRAFTS_SHARE = 1 / 16
"""Share of a GPU's memory that the logits of more drafts than that may take."""

_MATCH = {"ngram": (2, 4), "suffix": (1, 24)}  # defaults of shortest and longest match
_METHODS = {
    "ngram": "ngram", "ngram_gpu": "ngram", "[ngram]": "ngram", "suffix": "suffix", "draft_model": "draft_model",
    "eagle": "eagle", "eagle3": "eagle3", "dflash": "dflash",
    "mtp": "mtp", "deepseek_mtp": "mtp", "qwen3_next_mtp": "mtp", "qwen3_5_mtp": "mtp", "glm4_moe_mtp": "mtp",
}  # fmt: skip
_WITH_FOLDER = ("draft_model", "eagle", "eagle3", "dflash")
"""Methods that run a model of a folder of its own."""
WITH_MODEL = (*_WITH_FOLDER, "mtp")
"""Methods that run a model."""
_KNOWN = "ngram, ngram_gpu, suffix, draft_model, eagle, eagle3, mtp and dflash"
_DEFAULT_DRAFTS = {"suffix": 8, "dflash": 7}  # of the others: 4
_NOT_BUILT = {
    "dspark": "corrects the drafts of a block one after another",
    "medusa": "has a head for each draft", "mlp_speculator": "has no attention",
    "custom_class": "runs code of the user's", "extract_hidden_states": "drafts nothing",
}  # fmt: skip
"""Methods of vLLM that are not supported, and why."""
_KEYS = (
    "method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "model", "draft_tensor_parallel_size",
)  # fmt: skip
_NO_EFFECT = (
    "max_model_len", "enforce_eager", "attention_backend", "moe_backend", "code_revision",
    "disable_padded_drafter_batch", "use_local_argmax_reduction", "suffix_decoding_max_cached_requests",
)  # fmt: skip
"""Fields of vLLM that change nothing here: a drafter has the length, device and kernels of its engine."""


class DraftConfig(msgspec.Struct, frozen=True):
    method: str  # ngram, suffix, draft_model, eagle, eagle3, mtp or dflash
    num_drafts: int  # maximum per row and step
    # of ngram and suffix
    min_match: int = 0  # tokens at the end of a row that must have occurred before
    max_match: int = 0  # tokens that are compared: a longer match is preferred
    drafts_per_match: float | None = None  # maximum drafts per matching token; None: no limit
    model: str | None = None  # folder or hub name of the model that drafts; None: the method needs none
    is_given: bool = True  # False: only the model was given, and its files tell the method

    @property
    def searches(self) -> bool:
        """Whether drafts come from the text of the row: without a match it has none."""
        return self.method in _MATCH


def read_draft_config(given: Mapping[str, Any] | str | None, short: str | None = None) -> DraftConfig | None:
    """The configuration from `speculative_config`, an object or its JSON text; or from `drafts`, its short form METHOD
    or METHOD:NUMBER. None: no drafts."""
    if short is not None:
        if given is not None:
            raise InvalidOption("drafts and speculative_config are both given; give one of them")
        method, _, number = short.partition(":")
        if number and not number.isdecimal():
            raise InvalidOption(f"drafts is {short!r}; give a method, or a method and a number, as ngram:4")
        given = {"method": method} | ({"num_speculative_tokens": int(number)} if number else {})
    if given is None:
        return None
    found = _fields(given)
    method = _method(found)
    num = _number(found, "num_speculative_tokens", _DEFAULT_DRAFTS.get(method, 4), MAX_DRAFTS)
    if method not in _MATCH:
        if match := [name for name in found if name.startswith("prompt_lookup")]:
            raise InvalidOption(f"speculative_config has {match[0]}, which {method} does not use; remove it")
        return DraftConfig(method, num, model=found.get("model"), is_given="method" in found)
    shortest, longest = _MATCH[method]
    least = _number(found, "prompt_lookup_min", 1, MAX_MATCH)
    max_match = _number(found, "prompt_lookup_max", max(longest, least), MAX_MATCH)
    min_match = _number(found, "prompt_lookup_min", min(shortest, max_match), MAX_MATCH)
    if min_match > max_match:
        raise InvalidOption(
            f"prompt_lookup_min is {min_match} and prompt_lookup_max {max_match}; raise the second or lower the first"
        )
    return DraftConfig(method, num, min_match, max_match, 1.0 if method == "suffix" else None)


def check_draft_ranks(given: Mapping[str, Any] | str | None, num_ranks: int) -> None:
    """Checks `draft_tensor_parallel_size`. `num_ranks`: those of the model; a drafter is divided like its model."""
    count = None if given is None else _fields(given).get("draft_tensor_parallel_size")
    if count is not None and (isinstance(count, bool) or count != num_ranks):
        raise InvalidOption(
            f"draft_tensor_parallel_size of speculative_config is {count!r}, and tensor_parallel_size is {num_ranks}; "
            "a drafter runs on all ranks of its model: give the same number, or remove it"
        )


def _fields(given: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise InvalidOption(
                f"speculative_config is {given!r}; give a JSON object, as "
                '{"method": "ngram", "num_speculative_tokens": 4}'
            ) from None
    if not isinstance(given, Mapping):
        raise InvalidOption(f"speculative_config is {given!r:.100}; give an object with a method")
    for name in given:
        if name not in _KEYS and name not in _NO_EFFECT:
            near = difflib.get_close_matches(str(name), _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else "it takes " + ", ".join(_KEYS)
            raise InvalidOption(f"speculative_config has no field {name!r}; {hint}")
    return {name: value for name, value in given.items() if value is not None and name in _KEYS}


def _method(found: Mapping[str, Any]) -> str:
    method, model = found.get("method"), found.get("model")
    for name, value in (("method", method), ("model", model)):
        if value is not None and not isinstance(value, str):
            raise InvalidOption(f"{name} of speculative_config is {value!r:.100}; give a text")
    if method is None and model is not None:
        method = model if model in ("ngram", "[ngram]") else "draft_model"
    if method is None:
        raise InvalidOption(f"speculative_config has no method; the methods are {_KNOWN}")
    if method in _NOT_BUILT:
        raise InvalidOption(f"drafts by {method} are not supported: it {_NOT_BUILT[method]}; the methods are {_KNOWN}")
    if method not in _METHODS:
        raise InvalidOption(f"there is no method {method!r} for drafts; the methods are {_KNOWN}")
    if _METHODS[method] in _WITH_FOLDER:
        if not isinstance(model, str) or not model:
            raise InvalidOption(f'drafts by {method} need a model; give its folder as "model" of speculative_config')
    elif model is not None and model not in _METHODS:
        raise InvalidOption(f"speculative_config names the model {model!r}, and {method} needs none; remove it")
    return _METHODS[method]


def _number(found: Mapping[str, Any], name: str, default: int, limit: int) -> int:
    value = found.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise InvalidOption(f"{name} of speculative_config is {value!r}; give a whole number from 1 to {limit}")
    return value


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
    images: ImageInfo | None = None  # how it sees pictures; None: only its text part is loaded

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


class ImageConfig(msgspec.Struct, frozen=True):
    """Images of requests, and the arena of rows that a tower makes of them."""

    num_slots: int  # of the arena; an image has whole slots
    slot_rows: int
    row_size: int  # elements
    step_patches: int  # that one step encodes, unless a single image has more
    max_patches: int  # of a single image, by the image processor and the model length
    patch_bytes: int  # of a patch, as it is uploaded
    patch_values: int  # of a patch with all of its frames
    hidden_size: int  # of the tower
    sizes: ModelSizes  # of the tower, per patch
    patches_per_token: int
    has_parts: bool  # positions have three parts: frame, row, column

    def fitted(self, length: int, step_tokens: int) -> ImageConfig:
        """For requests of up to `length` tokens: the largest image fits the arena, and so do those of one step."""
        most = min(self.max_patches // self.patches_per_token, length)
        return msgspec.structs.replace(
            self,
            num_slots=-(-max(most, min(step_tokens, length)) // self.slot_rows),
            step_patches=step_tokens * self.patches_per_token,
            max_patches=most * self.patches_per_token,
        )


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
    images: ImageConfig | None = None  # None: prompts have no images
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
