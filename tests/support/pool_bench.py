"""An engine core for pooling tests without a front end: takes token ids, returns arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from slipstream.base.errors import SlipstreamError
from slipstream.config.options import make_options
from slipstream.contracts.messages import Abort, Output, Submit
from slipstream.device.device import Device
from slipstream.engine.build import build_core, open_model
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from tiny import write_tiny

Params = PoolingParams | SamplingParams


class PoolBench:
    def __init__(self, folder: Path, *, device: Device | None = None, device_kind: str = "cpu", **options: Any) -> None:
        given = dict(dtype="float64", max_model_len=64, page_size=4, num_threads=1, depth=0, device=device_kind)
        given |= options
        opened = open_model(make_options(model=str(folder), **given))
        self.core = build_core(opened, device=device)
        self.results: dict[str, np.ndarray[Any, Any]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}
        self.ended: set[str] = set()
        self.params: dict[str, Params] = {}
        self._count = 0

    def __enter__(self) -> PoolBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.close()

    def submit(
        self, prompt: Sequence[int], params: Params, id: str | None = None, type_start: int | None = None
    ) -> str:
        id = f"r{self._count}" if id is None else id
        self._count += 1
        self.core.submit(Submit(id, list(prompt), params, 0.0, params.priority, params.cache_salt, [], type_start))
        self.params[id] = params
        return id

    def abort(self, id: str) -> None:
        self.core.abort(Abort(id))

    def step(self) -> list[Output]:
        outputs = self.core.step()
        for output in outputs:
            assert output.request_id not in self.ended, f"{output.request_id} has an output after its last one"
            if output.pooled is not None:
                assert not output.token_ids and output.finish_reason == "stop"
                self.results[output.request_id] = output.pooled.array()
            elif output.error is not None:
                self.errors[output.request_id] = output.error
            else:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ended.add(output.request_id)
        return outputs

    def run(self) -> None:
        for _ in range(100_000):
            if not self.core.has_requests():
                break
            self.step()
        assert not self.core.has_requests()
        self.core.scheduler.check()

    def pool(
        self, prompts: Sequence[Sequence[int]], params: Params | Sequence[Params], types: Sequence[int | None] = ()
    ) -> list[Any]:
        """The result of each prompt: an array, or the generated tokens."""
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        starts = list(types) or [None] * len(prompts)
        ids = [self.submit(*one, type_start=start) for *one, start in zip(prompts, each, starts, strict=True)]
        self.run()
        if failed := [self.errors[id] for id in ids if id in self.errors]:
            raise SlipstreamError(failed[0])
        return [self.results[id] if id in self.results else self.tokens[id] for id in ids]


def assert_same(got: Sequence[Any], wanted: Sequence[Any], tolerance: float = 1e-9) -> None:
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        if isinstance(theirs, list):
            assert ours == theirs
        else:
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            assert np.abs(ours - theirs).max(initial=0.0) < tolerance


def write_reward_model(folder: Path) -> Path:
    """A causal model with two scores per token; token 9 marks steps."""
    return rewrite(
        write_tiny(folder, "qwen2"),
        {"architectures": ["Qwen2ForProcessRewardModel"], "step_tag_id": 9},
        {
            "score.0.weight": _random(64, 64), "score.0.bias": _random(64),
            "score.2.weight": _random(2, 64), "score.2.bias": _random(2),
        },
        without=("lm_head.weight",),
    )  # fmt: skip


def rewrite(
    folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], without: Sequence[str] = ()
) -> Path:
    """Changes fields and tensors of a checkpoint."""
    path, file = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    save_file({k: v for k, v in (load_file(file) | weights).items() if k not in without}, file, {"format": "pt"})
    return folder


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 0.3
