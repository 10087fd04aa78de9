"""transformers as the oracle of decoders: logits of whole prompts, entirely in float64 if requested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM


def oracle(
    folder: Path, dtype: torch.dtype, prompts: dict[str, list[int]], kind: Any = AutoModelForCausalLM
) -> dict[str, torch.Tensor]:
    """`kind`: the class of transformers that loads the folder."""
    # the sdpa attention of transformers ignores soft caps and sinks; models without attention refuse it
    config = (folder / "config.json").read_text()
    sinks = ('"gpt_oss"', '"granite_swa"', '"granitemoe_swa"', '"mimo_v2_flash"')
    eager = ('"attn_logit_softcapping"', *sinks, '"mamba"', '"mamba2"')
    how = "eager" if any(word in config for word in eager) else "sdpa"
    model = kind.from_pretrained(folder, dtype=dtype, attn_implementation=how).eval()
    if dtype is torch.float64:
        norm_in_float64(model)
        model.config._experts_implementation = "eager"  # the grouped implementation does not take float64
    with exact_math(dtype):
        return {name: model(torch.tensor([ids])).logits[0] for name, ids in prompts.items()}


@contextmanager
def exact_math(dtype: torch.dtype) -> Iterator[None]:
    """Models of transformers compute in their dtype: eager attention, routers and delta rules in no other."""
    softmax = functional.softmax
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        # eager attention computes its softmax in float32 for every dtype
        patch.setattr(functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
        if dtype is torch.float64:  # routers and delta rules compute in float32
            # its sines differ from those of torch.sin in the last bit of float32
            patch.setattr(torch, "polar", lambda size, angle: torch.complex(size * angle.cos(), size * angle.sin()))
            of_tensor = torch.Tensor.softmax
            patch.setattr(torch.Tensor, "softmax", lambda x, dim, dtype=None: of_tensor(x, dim))
            for name in ("float", "type", "to"):
                patch.setattr(torch.Tensor, name, stays_float64(getattr(torch.Tensor, name)))
        yield


def stays_float64(convert: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A conversion that leaves float64 as it is unless it is asked for another device."""

    def converted(x: torch.Tensor, *to: Any, **others: Any) -> torch.Tensor:
        asked = not to or to[0] is torch.float32 or isinstance(to[0], torch.Tensor)
        return x if x.dtype is torch.float64 and asked else convert(x, *to, **others)

    return converted


def norm_in_float64(model: nn.Module) -> None:
    """Makes norms compute in float64: those of transformers compute in float32, too coarse to compare at 1e-9."""
    for module in model.modules():
        # those of Gemma 3n and 4 compute in the dtype that Tensor.float gives, which `oracle` changes
        if type(module).__name__.endswith("RMSNorm") and not type(module).__name__.startswith(("Gemma3n", "Gemma4")):
            module.forward = _float64_norm(module)


def _float64_norm(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    eps, scale = getattr(norm, "eps", None) or norm.variance_epsilon, 1.0
    if getattr(norm, "weight", None) is not None:
        with torch.no_grad():  # Gemma and Qwen3-Next store weight - 1
            added = (norm(torch.ones_like(norm.weight)) - norm.weight).mean().round()
        scale = added + norm.weight
    return lambda x: scale * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def continue_greedily(folder: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """`count` greedy tokens and their logprobs, in float64. Each token needs a forward pass over all previous tokens:
    with a KV cache transformers 5.17 is wrong when LongRoPE switches its factors."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    norm_in_float64(model)
    tokens, logprobs = list(prompt), []
    for _ in range(count):
        with torch.no_grad():
            last = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
        tokens.append(int(last.argmax()))
        logprobs.append(float(last.max()))
    return tokens[len(prompt) :], logprobs
