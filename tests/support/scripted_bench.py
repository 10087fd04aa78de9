"""Bench: a scheduler over the scripted device."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np

from hand_cache import make_spec
from scripted import ScriptedExecutor
from scripted_tokens import IMAGE, alone, horizon, pooled
from slipstream.checkpoint.model_info import ModelSizes
from slipstream.config.config import CacheConfig, ImageConfig, SchedulerConfig, StateConfig
from slipstream.contracts.cache_spec import CacheGroup, StateField, StateSpec
from slipstream.contracts.images import ImageInput, ImageSpan, PromptImages
from slipstream.contracts.messages import Output
from slipstream.contracts.request import NEVER, FinishReason, Request
from slipstream.contracts.step import StepPlan
from slipstream.params.lora import LoRARequest
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.adapters import Adapters
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.scheduler import Scheduler


def make_config(
    page_size: int = 4,
    num_pages: int = 64,
    prefix_caching: bool = True,
    num_groups: int = 1,
    windows: Sequence[int] = (),
    step_tokens: int = 64,
    window_pages: int | None = None,  # of groups with a window, if not the same number
    num_checkpoints: int | None = None,  # of a model with recurrent states; None: it has none
    border: int = 0,
    spacing: int = 1 << 20,
    tier: float = 0.0,  # size of the second tier, as a multiple of the device's cache
) -> CacheConfig:
    groups = tuple(
        CacheGroup(make_spec(1, 8 * (g + 1), page_size, window=w), (g,))
        for g, w in enumerate(windows or (0,) * num_groups)
    )
    pages = tuple(num_pages if window_pages is None or not group.window else window_pages for group in groups)
    states = None
    if num_checkpoints is not None:
        spec = StateSpec((StateField("state", (8,), "float32"),))
        states = StateConfig((spec,), num_checkpoints, border or page_size, spacing)
    config = CacheConfig(page_size, num_pages, prefix_caching, groups, pages, step_tokens, states)
    return msgspec.structs.replace(config, tier_bytes=int(tier * config.num_bytes))


PATCHES_PER_TOKEN = 4


def make_images(num_slots: int = 32, slot_rows: int = 2, step_patches: int = 64, max_patches: int = 256) -> ImageConfig:
    return ImageConfig(
        num_slots=num_slots, slot_rows=slot_rows, row_size=1, step_patches=step_patches, max_patches=max_patches,
        patch_bytes=2, patch_values=2, hidden_size=1, sizes=ModelSizes(), patches_per_token=PATCHES_PER_TOKEN,
        has_parts=True,
    )  # fmt: skip


def with_images(parts: Sequence[int | tuple[int, int, int]]) -> tuple[list[int], PromptImages]:
    """A prompt of tokens and images: (number of the picture, rows, columns)."""
    tokens: list[int] = []
    images: list[ImageInput] = []
    spans: list[ImageSpan] = []
    shift = 0
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        number, rows, cols = part
        patches = np.full((rows * cols * PATCHES_PER_TOKEN, 2), number % 256, np.uint8)
        patches[:, 1] = rows
        spans.append(ImageSpan(len(images), len(tokens), (1, rows, cols), len(tokens) + shift))
        images.append(ImageInput.of(repr(part).encode(), rows * cols, ((1, 2 * rows, 2 * cols),), patches))
        tokens += [IMAGE] * (rows * cols)
        shift = spans[-1].next_position() - len(tokens)
    return tokens, PromptImages(images, spans, shift)


class Bench:
    """A scheduler and a scripted device, run as the core runs them."""

    def __init__(
        self,
        depth: int = 0,
        page_size: int = 4,
        num_pages: int = 64,
        prefix_caching: bool = True,
        num_groups: int = 1,
        windows: Sequence[int] = (),
        window_pages: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 64,
        max_waiting: int = 1000,
        chunked_prefill: bool = True,
        staged_ints: int = 4096,
        max_step_logprobs: int = 2**20,
        short_rope: int | None = None,
        num_drafts: int = 0,
        draft_seed: int = 0,
        num_checkpoints: int | None = None,
        border: int = 0,
        spacing: int = 1 << 20,
        drops_last_page: bool = False,
        adapters: Adapters[Request] | None = None,
        tier: float = 0.0,
        images: ImageConfig | None = None,
    ) -> None:
        self.depth = depth
        windows = windows or (0,) * num_groups
        self.horizon = horizon(windows) if num_checkpoints is None else NEVER
        config = make_config(
            page_size,
            num_pages,
            prefix_caching,
            num_groups,
            windows,
            max_num_batched_tokens,
            window_pages,
            num_checkpoints,
            border,
            spacing,
            tier,
        )
        config = msgspec.structs.replace(config, drops_last_page=drops_last_page)
        self.cache = CacheManager(config, num_drafts)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                max_waiting=max_waiting,
                chunked_prefill=chunked_prefill,
                depth=depth,
                seed=0,
                staged_ints=staged_ints,
                max_step_logprobs=max_step_logprobs,
                cached_tasks=("embed",),
                short_rope=short_rope,
            ),
            self.cache,
            adapters=adapters,
            image_config=images,
        )
        self.scheduler.drafts.num_drafts = num_drafts  # of every plan
        drafter = random.Random(draft_seed) if num_drafts else None
        self.executor = ScriptedExecutor(
            page_size, windows, max_num_seqs, short_rope, drafter, num_checkpoints, border or page_size
        )
        self.plans: list[StepPlan] = []
        self.outputs: list[Output] = []
        self.requests: list[Request] = []

    def submit(
        self,
        prompt: Sequence[int],
        *,
        id: str | None = None,
        n: int = 1,
        max_tokens: int = 8,
        stop: Sequence[int] = (),
        seed: int = 0,
        priority: int = 0,
        salt: str = "",
        caller: str = "",
        words: Sequence[Sequence[int]] = (),
        lora: LoRARequest | None = None,
        later: bool = False,
        images: PromptImages | None = None,
        **params: object,
    ) -> list[Request]:
        """`later`: the caller submits them, or a source."""
        id = f"r{len(self.requests)}" if id is None else id
        sampling = SamplingParams(n=n, max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        length = min(len(prompt) + max_tokens, self.scheduler.config.max_model_len)
        requests = [
            Request(
                id, list(prompt), sampling, sample=k, priority=priority, caller=caller, cache_salt=salt,
                stop_ids=tuple(stop), max_length=length, seed=seed, bad_words=tuple(map(tuple, words)), lora=lora,
                images=images,
            )
            for k in range(n)
        ]  # fmt: skip
        if not later:
            self.scheduler.submit(requests)
        self.requests += requests
        return requests

    def pool(
        self,
        prompt: Sequence[int],
        *,
        id: str | None = None,
        task: str = "embed",
        salt: str = "",
        caller: str = "",
        later: bool = False,
        **params: object,
    ) -> Request:
        id = f"r{len(self.requests)}" if id is None else id
        pooling = PoolingParams(task=task, **params)  # type: ignore[arg-type]
        request = Request(
            id, list(prompt), pooling, priority=pooling.priority, caller=caller, cache_salt=salt,
            max_length=len(prompt) + 1,
        )  # fmt: skip
        if not later:
            self.scheduler.submit([request])
        self.requests.append(request)
        return request

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.executor.launch(plan)
        return plan

    @property
    def num_in_flight(self) -> int:
        return len(self.scheduler._in_flight)

    def commit(self) -> list[Output]:
        outputs = self.scheduler.commit(self.executor.wait())
        self.outputs += outputs
        return outputs

    def step(self) -> list[Output]:
        plan = self.plan()
        if self.num_in_flight and (plan is None or self.num_in_flight > self.depth):
            return self.commit()
        assert plan is not None or not self.scheduler.has_requests(), (
            "work, nothing planned and nothing in flight: a hang"
        )
        return []

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                break
            self.step()
            self.scheduler.check()
        assert not self.scheduler.has_requests(), f"still busy after {max_steps} steps"
        self.check_empty()

    def preempt_any(self, rng: random.Random) -> None:
        """One of the running requests, if there are any, whether pages run out or not."""
        if running := list(self.scheduler._row_allocator.running):
            self.scheduler._running.preempt(rng.choice(running))

    def run_until_preempted(self, request: Request) -> None:
        """Run up to and including the plan that does it, before anything more is committed."""
        while self.plan() is not None and not request.num_preemptions:
            if self.num_in_flight > self.depth:
                self.commit()

    def check_empty(self) -> None:
        self.scheduler.check()
        assert all(group.pool.num_free == group.pool.num_usable for group in self.cache.groups)
        assert (self.scheduler.num_running, self.scheduler.num_waiting, self.num_in_flight) == (0, 0, 0)
        assert all(request.pending == 0 for request in self.requests)

    def output_of(self, request: Request) -> list[int]:
        """All outputs of a sample, joined."""
        mine = [output for output in self.outputs if (output.request_id, output.sample) == (request.id, request.sample)]
        return [token for output in mine for token in output.token_ids]

    def check_tokens(self, request: Request, finish: FinishReason | None = None) -> None:
        """Assert that the outputs are those the request gets alone."""
        if request.pooling is not None:
            (only,) = [output for output in self.outputs if output.request_id == request.id]
            assert only.pooled is not None and only.finish_reason is FinishReason.STOP
            assert only.pooled.array().tolist() == [pooled(request.tokens[-self.horizon :])]
            return
        tokens, reason = alone(request, self.horizon)
        assert request.tokens[request.num_prompt :] == self.output_of(request) == tokens
        last = [o for o in self.outputs if (o.request_id, o.sample) == (request.id, request.sample)][-1]
        assert last.finish_reason is reason and (finish is None or reason is finish)
