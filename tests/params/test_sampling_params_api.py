"""SamplingParams as vLLM's users write it: assignments, copies, positions, and values that mean something else."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sampling_values import VALUES, with_value
from slipstream import RequestOutputKind, SamplingParams
from slipstream.base.errors import InvalidParams
from slipstream.params.values import MAX_HOLDERS, is_deep, is_deep_json, is_wide_json

VLLM = json.loads((Path(__file__).parents[1] / "data" / "vllm_names.json").read_text())["classes"]["SamplingParams"]
INTERNAL = {"skip_clone", "output_text_buffer_length", "routed_experts_prompt_start"}


def test_fields_have_the_order_and_the_defaults_of_vllm():
    theirs = [name for name in VLLM["fields"] if name not in INTERNAL]
    assert list(SamplingParams.__struct_fields__[: len(theirs)]) == theirs
    ours = SamplingParams()
    for name, value in VLLM["defaults"].items():
        if name in theirs and name != "output_kind":
            assert getattr(ours, name) == value or (value is None and not getattr(ours, name)), name
    for name in INTERNAL:
        with pytest.raises(InvalidParams, match=f"has no {name}"):
            SamplingParams(**{name: {}})


def test_every_parameter_has_a_value_for_the_nets():
    assert VALUES.keys() == set(SamplingParams.__struct_fields__)
    for name, value in VALUES.items():
        assert getattr(with_value(name, min_tokens=0), name) != getattr(SamplingParams(), name), f"{name}={value!r}"


def test_parameters_can_be_assigned_and_stay_checked():
    params = SamplingParams(temperature=0.5)
    params.temperature, params.stop = 0.9, "end"
    assert (params.temperature, params.stop_strings) == (0.9, ("end",))
    with pytest.raises(InvalidParams, match="top_p is 5"):
        params.top_p = 5
    with pytest.raises(InvalidParams, match="did you mean temperature"):
        params.tempreature = 1
    assert params == SamplingParams(temperature=0.9, stop="end")


def test_copies_share_nothing_that_changes():
    params = SamplingParams(logit_bias={3: 1.0}, extra_args={"level": 1})
    copies = [params.clone(), params.snapshot(), copy.deepcopy(params)]
    params.logit_bias[3] = 7.0
    params.temperature = 0.1
    assert all(each.logit_bias == {3: 1.0} and each.temperature == 1.0 for each in copies)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"logprobs": True}, "logprobs", 1),
        ({"logprobs": False}, "logprobs", None),
        ({"prompt_logprobs": True}, "prompt_logprobs", 1),
        ({"seed": -1}, "seed", None),
        ({"logit_bias": {3: 500, 4: -500.5}}, "logit_bias", {3: 100.0, 4: -100.0}),
        ({"output_kind": RequestOutputKind.DELTA}, "output_kind", RequestOutputKind.DELTA),
    ],
)
def test_values_mean_what_they_mean_in_vllm(given, name, value):
    assert getattr(SamplingParams(**given), name) == value


def test_numbers_of_numpy_are_numbers():
    given = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), max_tokens=np.uint8(9), seed=np.uint64(2**64 - 1),
        ignore_eos=np.bool_(True), logprobs=np.int16(3), stop_token_ids=[np.int32(5), 6],
        allowed_token_ids=np.arange(3), logit_bias={np.int64(7): np.float16(1.5)},
    )  # fmt: skip
    assert given == SamplingParams(
        n=2, temperature=0.5, max_tokens=9, seed=2**64 - 1, ignore_eos=True, logprobs=3, stop_token_ids=[5, 6],
        allowed_token_ids=[0, 1, 2], logit_bias={7: 1.5},
    )  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(given))["max_tokens"] == 9  # plain numbers, which can be sent
    for wrong in ({"max_tokens": np.float32(1.5)}, {"temperature": np.bool_(True)}, {"stop_token_ids": np.ones(2)}):
        with pytest.raises(InvalidParams):
            SamplingParams(**wrong)


def test_from_optional_takes_none_for_a_default():
    params = SamplingParams.from_optional(n=None, temperature=None, top_p=0.5, max_tokens=None, logit_bias={"3": 200})
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 0.5, None)
    assert params.logit_bias == {3: 100.0}


@pytest.mark.parametrize("wrong", [{"output_kind": "delta"}, {"flat_logprobs": 1}, {"skip_reading_prefix_cache": 1}])
def test_wrong_values_are_refused_by_name(wrong):
    with pytest.raises(InvalidParams, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_half_of_a_surrogate_pair_is_refused(name):
    with pytest.raises(InvalidParams, match=f"{name} holds half of a surrogate pair") as caught:
        SamplingParams(**{name: ["fine", "half \ud800"]})
    assert caught.value.param == name


def _json(draw: random.Random, levels: int) -> tuple[str, int]:
    """JSON with brackets and escapes in its texts, and its depth."""
    if not levels or draw.random() < 0.2:
        return draw.choice(['"[{"', r'"\\"', r'"\"]"', r'"\\\"[["', "5", '"é"', r'"\u005b["']), 0
    inner = [_json(draw, levels - 1) for _ in range(draw.randint(0, 3))]
    depth = 1 + max((depth for _, depth in inner), default=0)
    if draw.random() < 0.5:
        return f"[{', '.join(text for text, _ in inner)}]", depth
    return "{" + ", ".join(f'"k{index}}}": {text}' for index, (text, _) in enumerate(inner)) + "}", depth


def test_the_depth_of_json_is_that_of_its_value():
    draw = random.Random(0)
    found = set()
    for _ in range(300):
        text, depth = _json(draw, 8)
        value = json.loads(text)
        for limit in range(10):
            assert is_deep(value, limit) == is_deep_json(text, limit) == is_deep_json(text.encode(), limit), text
            assert is_deep(value, limit) == (depth > limit), (text, limit)
        found.add(depth)
    assert found == set(range(9))


def test_brackets_in_texts_are_no_objects():
    inner = ", ".join(["{}", "[]"] * (MAX_HOLDERS // 2))
    assert is_wide_json(f"[{inner}]".encode()) and not is_wide_json(f"[{inner[4:]}]".encode())
    assert not is_wide_json(json.dumps(["[{" * MAX_HOLDERS, '"[' * MAX_HOLDERS]).encode())


@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5, '"a" ]]' + "[" * 1000, '{"a": "' + "[" * 1000])
def test_text_that_is_cut_is_deep(text):
    """A decoder would go as deep before it finds that the text is cut."""
    assert is_deep_json(text)
