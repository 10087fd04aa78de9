"""A value of each sampling parameter, over which the nets walk: a new parameter gets a line in VALUES."""

from __future__ import annotations

import math
from typing import Any

from slipstream import RequestOutputKind, SamplingParams
from slipstream.params.sampling import BENCH, PARAMS, names_for
from slipstream.params.values import Integer, Real

WORDS = [*map(chr, range(33, 100, 2)), "th", "ee", "x y", *(a + b for a in "abcdefgh" for b in "ijklmnop")]
FEW_IDS = {"allowed_token_ids": list(range(60, 70))}  # tokens that are drawn again, so that penalties matter

# not the default, and such that the tokens of a tiny model depend on it
VALUES: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.7,
    "top_k": 5,
    "min_p": 0.2,
    "top_a": 0.3,
    "repetition_penalty": 4.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 1.8,
    "max_tokens": 5,
    "min_tokens": 6,
    "thinking_token_budget": 2,
    "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 2},
    "stop": ["a", "e", "zz"],
    "ignore_eos": True,
    "n": 3,
    "seed": 1234,
    "logprobs": 2,
    "prompt_logprobs": 3,
    "logprob_token_ids": [3, 250, 17],
    "stop_token_ids": list(range(0, 256, 9)),
    "allowed_token_ids": list(range(0, 256, 7)),
    "logit_bias": {65: 5.0, 66: 4.5, 300: -100.0, 0: 3.0},
    "bad_words": WORDS,
    "structured_outputs": {"regex": "[a-z]*"},
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "truncate_prompt_tokens": 9,
    "priority": 2,
    "cache_salt": "salt",
    "detokenize": False,
    "flat_logprobs": True,
    "output_kind": RequestOutputKind.FINAL_ONLY,
    "skip_reading_prefix_cache": True,
    "extra_args": {"level": 1},
    "logits_processors": [lambda output_ids, logits: logits],
}
_BESIDE: dict[str, dict[str, Any]] = {  # what a parameter needs for its effect
    "seed": {"temperature": 1.3},
    "repetition_penalty": {"temperature": 0.0, "logprobs": 1} | FEW_IDS,
    "presence_penalty": {"temperature": 0.7} | FEW_IDS,
    "frequency_penalty": {"temperature": 0.7} | FEW_IDS,
    "repetition_detection": {"temperature": 0.7, "n": 4} | FEW_IDS,
    "min_tokens": {"stop_token_ids": list(range(0, 256, 3))},
    "logit_bias": {"temperature": 0.8},
    "prompt_logprobs": {"temperature": 0.0},
    "n": {"logprobs": 0},
    "detokenize": {"logprobs": 1},
    "truncate_prompt_tokens": {"prompt_logprobs": 1, "cache_salt": "s", "priority": 2},
}
# tokens are drawn by these: all that `bench` has a flag for, and lists
DRAWN = (
    *names_for(BENCH), "seed", "n", "min_tokens", "stop_token_ids", "stop", "repetition_detection", "logit_bias",
    "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "logprob_token_ids", "detokenize",
    "truncate_prompt_tokens",
)  # fmt: skip

TRUNCATIONS = {
    name: VALUES[name] for name in names_for(BENCH) if name != "temperature" and not name.endswith("penalty")
}


def with_value(name: str, **others: Any) -> SamplingParams:
    """A parameter with its value, and what it needs. `others`: beside them."""
    return SamplingParams(**(others | _BESIDE.get(name, {}) | {name: VALUES[name]}))


def edges(name: str) -> list[Any]:
    """The smallest and the largest number that a parameter takes."""
    check = PARAMS[name].check
    assert isinstance(check, Real | Integer)
    return [1e-9 if isinstance(check, Real) and check.open_low else check.low, check.high]


def bad_values(name: str) -> list[Any]:
    """What a parameter that takes numbers does not take."""
    check = PARAMS[name].check
    if isinstance(check, Real):
        return [check.low - (0 if check.open_low else 0.1), check.high * 1.1, math.nan, math.inf, "x", True]
    assert isinstance(check, Integer)
    return [check.low - 1, check.high + 1, 1.5, "x", *([] if check.switch else [True])]


NUMBERS = tuple(name for name, row in PARAMS.items() if isinstance(row.check, Real | Integer))
