"""Accuracy of a model on a text: perplexity, and its next-token distributions beside those of a reference model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.api.llm import LLM
from slipstream.base.errors import UserError
from slipstream.params.sampling import SamplingParams

_LIKELY = math.log(1e-4)  # logprob of tokens that may be sampled


class DistributionReader:
    """Returns the distributions that an LLM computes for a prompt. The LLM must run one request at a time."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.seen: list[torch.Tensor] = []
        model: Any = llm.apply_model(lambda module: module)[0]
        compute = model.logits

        def record(hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = compute(hidden)
            if not (logits.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.seen.append(logits.detach().float().cpu())
            return logits

        model.logits = record

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocabulary] float64: logprobs of the token after each id.

        One token is appended to the prompt, so that these are the logits of its scored tokens, in order. The logits of
        the last token may come from a captured graph, which runs no Python code, so they cannot be recorded.
        """
        self.seen.clear()
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        self.llm.generate([[*ids, ids[-1]]], params, use_tqdm=False)
        logits = torch.cat(self.seen)[: len(ids)]
        assert len(logits) == len(ids), f"{len(logits)} positions were computed, the prompt has {len(ids)}"
        return logits.double().log_softmax(-1)


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences between a model's distributions and those of a reference."""

    kl_mean: float  # KL(reference || model) in nats
    kl_p99: float
    kl_max: float
    top1: float  # share of positions where both have the same most likely token
    logprob_max: float  # largest difference of a logprob, of tokens with a probability over 1e-4


@dataclass(frozen=True, slots=True)
class Evaluation:
    positions: int  # distributions that were compared
    perplexity: float  # of the tokens of the text that follow another one in their window
    reference_perplexity: float | None = None
    differences: Differences | None = None


def token_ids(llm: LLM, text: str) -> list[int]:
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise UserError("the model has no tokenizer, which a text needs; give --tokenizer")
    return tokenizer.encode(text)


def cut_windows(ids: Sequence[int], size: int, positions: int | None) -> Iterator[Sequence[int]]:
    """The first `positions` tokens, all by default, in windows of `size` tokens; the last may be shorter."""
    positions = len(ids) if positions is None else positions
    if len(ids) < max(positions, 2):
        raise UserError(f"the text has {len(ids)} tokens, and {max(positions, 2)} are needed; give a longer text")
    for start in range(0, positions, size):
        yield ids[start : min(start + size, positions)]


def evaluate(
    model: DistributionReader, windows: Iterable[Sequence[int]], reference: DistributionReader | None = None
) -> Evaluation:
    """Runs each window as one prompt. Its first token has no context and does not count in perplexities."""
    own, others = Likelihood(), Likelihood()
    parts: list[torch.Tensor] = []
    positions = 0
    for ids in windows:
        found = model.logprobs(ids)
        positions += len(found)
        own.add(found, ids)
        if reference is not None:
            expected = reference.logprobs(ids)
            if expected.shape != found.shape:
                raise UserError(
                    f"the model has {found.shape[1]} tokens and the reference {expected.shape[1]}: their distributions "
                    "cannot be compared; give a reference with the same vocabulary"
                )
            others.add(expected, ids)
            parts.append(compare(expected, found))
    if reference is None:
        return Evaluation(positions, own.perplexity)
    return Evaluation(positions, own.perplexity, others.perplexity, summarize(parts))


def compare(reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """[3, positions] of two tables of logprobs: KL, whether the most likely token is the same, largest difference."""
    same = reference.argmax(-1) == found.argmax(-1)
    kl = (reference.exp() * (reference - found)).sum(-1)
    widest = (reference - found).abs().masked_fill(reference <= _LIKELY, 0).amax(-1)
    return torch.stack([kl, same.double(), widest])


def summarize(parts: Sequence[torch.Tensor]) -> Differences:
    kl, same, widest = torch.cat(list(parts), 1)
    return Differences(
        float(kl.mean()), float(kl.quantile(0.99)), float(kl.max()), float(same.mean()), float(widest.max())
    )


class Likelihood:
    """Perplexity of texts, added window by window."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, logprobs: torch.Tensor, ids: Sequence[int]) -> None:
        following = torch.tensor(ids[1:], dtype=torch.int64)
        self.total += float(logprobs[:-1].gather(1, following[:, None]).sum())
        self.count += len(following)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.total / self.count)
