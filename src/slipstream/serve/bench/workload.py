"""Workload: random prompts of given lengths, determined by a seed."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from slipstream.base.errors import InvalidOption


class Item(msgspec.Struct, frozen=True):
    prompt: list[int]
    output_len: int


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`num_prompts` prompts of `input_len` random tokens, with `output_len` tokens to generate each."""

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 1.0  # lengths are uniform from this fraction of the full length up to it
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if (value := getattr(self, name)) < 1:
                raise InvalidOption(f"{name} is {value}; give an integer from 1 up")
        if not 0 < self.range_ratio <= 1:
            raise InvalidOption(
                f"range_ratio is {self.range_ratio}; give a fraction above 0 and up to 1, where 1 is full length"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return self.input_len + self.output_len

    def items(self, vocab_size: int, trial: int = 0) -> list[Item]:
        """Returns the requests of a trial. Trials have the same lengths and different tokens."""
        lengths = random.Random(self.seed)
        tokens = random.Random(f"{self.seed} {trial} {self.num_prompts} {self.input_len} {self.output_len}")
        ids = range(vocab_size)
        return [
            Item(tokens.choices(ids, k=self._length(lengths, self.input_len)), self._length(lengths, self.output_len))
            for _ in range(self.num_prompts)
        ]

    def arrivals(self, rate: float, trial: int = 0) -> list[float]:
        """Returns the arrival times in seconds of a Poisson process with `rate` requests per second."""
        if not rate > 0:
            raise InvalidOption(f"rate is {rate}; give requests per second, above 0")
        draw = random.Random(f"{self.seed} {trial} arrivals")
        times, now = [], 0.0
        for _ in range(self.num_prompts):
            now += draw.expovariate(rate)
            times.append(now)
        return times

    def summary(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    def _length(self, draw: random.Random, full: int) -> int:
        return draw.randint(max(1, round(full * self.range_ratio)), full)
