"""Patterns of module names: the same answers as `re`, in bounded steps."""

from __future__ import annotations

import random
import re

import pytest

from slipstream.checkpoint.module_patterns import ModulePatterns

NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 1, 10, 11, 21)
    for part in ("self_attn.q_proj", "self_attn.qkv_proj", "mlp.experts.3.up_proj", "mlp.down_proj")
]
PIECES = [
    "q_proj",
    "q",
    "_",
    "proj",
    r"\.",
    ".",
    "1",
    r"\d",
    "[0-9]",
    "[^.]",
    "layers",
    "mlp",
    "(self_attn|mlp)",
    "(?:1|10)",
]
ENDS = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?"]


def expected(patterns: list[str], name: str) -> int | None:
    """PEFT's rule."""
    return next((n for n, each in enumerate(patterns) if re.match(rf"(.*\.)?({each})$", name)), None)


def test_patterns_match_as_in_peft():
    draw = random.Random(5)
    num_matches = 0
    for _ in range(400):
        patterns = [
            draw.choice(["", "", "^"])
            + "".join(draw.choice(PIECES) + draw.choice(ENDS) for _ in range(draw.randint(1, 5)))
            for _ in range(draw.randint(1, 4))
        ]
        patterns += draw.sample(["down_proj$", "layers.1.*", "a|mlp.*|b", "model.layers.1.self_attn.q_proj"], 1)
        ours = ModulePatterns(patterns)
        for name in NAMES:
            assert ours.first_match(name) == expected(patterns, name), (patterns, name)
            num_matches += expected(patterns, name) is not None
    assert num_matches > 1000


def test_settings_of_every_module_are_few_steps():
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for layer in range(12)
        for expert in range(16)
        for part in ("gate", "up", "down")
    ]
    ours = ModulePatterns(names)
    assert [ours.first_match(name) for name in names] == list(range(len(names)))


@pytest.mark.parametrize("pattern", ["(a*)*", "(a|a)*", "(.*)*.*.*.*b", "(a?){99}a{99}", "(q|_|q_)*$", "((x+x+)+y)"])
def test_a_pattern_that_takes_re_for_ever_takes_bounded_steps(pattern):
    ours = ModulePatterns([pattern])
    assert ours.first_match("a" * 500 + "!") is None


@pytest.mark.parametrize(
    "pattern",
    [
        "(", ")", "a)", "[a", "*", "a**", "a*+", "\\", "a{3,2}", "a^", "$a", r"(a)\1", r"\bq", "(?=a)", "(?i)a",
        "[b-a]", "a{99999999}", "(a{999}){999}", "(){99999}{99999}", "(" * 99 + ")" * 99, "a" * 1_000_001,
        "a{" + "9" * 5000 + "}",
    ],
)  # fmt: skip
def test_other_patterns_are_refused(pattern):
    with pytest.raises(ValueError, match=r"pattern.*plainer patterns"):
        ModulePatterns([pattern])


def test_steps_are_bounded_for_all_names_together():
    ours = ModulePatterns(["(a|b|c|d)*(e|.){1000}z"])
    with pytest.raises(ValueError, match="steps to match"):
        for number in range(1000):
            ours.first_match("abcd" * 300 + str(number))
