"""Plans of a scheduler survive encoding, and a plan of many decode rows has no part that msgpack encodes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from scripted_bench import Bench
from slipstream.contracts.codec import decoder, encode
from slipstream.contracts.step import (
    NO_INTS,
    NO_PAGES,
    AdapterLoad,
    AdapterPlan,
    Admission,
    DrawBias,
    DrawEdits,
    EmbedPlan,
    ImageEncoding,
    ImagePlan,
    LogitsEdit,
    PageUpdates,
    PoolAdmission,
    PoolPlan,
    PromptScores,
    SitOut,
    StatePlan,
    StepPlan,
    StepSizes,
    TierPlan,
)
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.ranks.ranks import encode_draw_edits


def check_equal(one, other, where="plan"):
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all(), where
    elif dataclasses.is_dataclass(one):
        assert type(one) is type(other), where
        for field in dataclasses.fields(one):
            check_equal(getattr(one, field.name), getattr(other, field.name), f"{where}.{field.name}")
    elif isinstance(one, tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            check_equal(left, right, f"{where}[{index}]")
    else:
        assert one == other and type(one) is type(other), where


def ints(*values):
    return np.array(values, np.int32)


def test_every_plan_of_a_scheduler():
    bench = Bench(depth=1)
    bench.submit([1, 2, 3], max_tokens=4, logprobs=2)
    bench.submit(list(range(30)), max_tokens=4, presence_penalty=0.5)
    plans, launch = [], bench.executor.launch
    bench.executor.launch = lambda plan: (plans.append(plan), launch(plan))
    bench.run()
    assert len(plans) == 4
    for plan in plans:
        check_equal(decoder(StepPlan).decode(encode(plan)), plan)


def test_a_plan_with_every_part():
    params = SamplingParams(temperature=0.5, stop_token_ids=[3], logit_bias={4: 1.0})
    plan = StepPlan(
        step=2**40 + 5,
        released=ints(7),
        admitted=(Admission(1, 2, 3, 3, 0, params, 2**63, 0, (5, 6), ints(1, 2, 3), ((7, 8),)),),
        rows=ints(1, 2),
        num_tokens=ints(3, 1),
        lengths=ints(3, 9),
        num_drawn=ints(1, 1),
        num_host_tokens=ints(3, 0),
        tokens=ints(4, 5, 6),
        following=ints(2, 0),
        new_pages=(PageUpdates(ints(1), ints(0), ints(9)), NO_PAGES),
        copies=ints(0, 1, 2, 1, 3, 4).reshape(2, 3),
        num_logprobs=2,
        scores=PromptScores(ints(0, 1), ints(5, 6), 2),
        pooling=PoolPlan(
            (PoolAdmission(2, 9, 4, 0, PoolingParams(task="embed")),),
            np.array([True, False]),
            (PoolingParams(task="embed"),),
            ints(-1),
            (3, 4),
            None,
            NO_INTS,
        ),
        states=StatePlan(ints(1, 2).reshape(1, 2), NO_INTS.reshape(0, 3)),
        has_drafts=True,
        num_proposed=3,
        returns_drafts=True,
        adapters=AdapterPlan(ints(0, -1), (AdapterLoad(0, 3, "sql", "/sql", b"digest"),)),
        joint_sizes=StepSizes(4, 2, False, True, True),
        embeds=EmbedPlan(ints(1, 2), (np.array([[0.5], [2.0]], np.float32),)),
        images=ImagePlan(
            (ImageEncoding(np.array([[7, 255]], np.uint8), ((1, 1, 1),), ints(4)),), ints(0), ints(4), ints(0), ints(3)
        ),
        tier=TierPlan(ints(0, 3, 1).reshape(1, 3), NO_INTS.reshape(0, 3)),
        catch_up=ints(1, 0, 2).reshape(1, 3),
    )
    check_equal(decoder(StepPlan).decode(encode(plan)), plan)
    defaults = [each.name for each in dataclasses.fields(plan) if each.default is not dataclasses.MISSING]
    # a new field belongs into this plan
    assert not any(getattr(plan, name) is None or getattr(plan, name) is False for name in defaults)


@pytest.mark.parametrize("bias", [None, DrawBias(ints(1), ints(2, 3).reshape(1, 2), np.ones((1, 2), np.float32))])
def test_masks(bias):
    late = DrawEdits(ints(1, 3), ints(*range(8)).reshape(2, 4), bias, offsets=None if bias is None else ints(0, 1))
    if bias is not None:
        late = dataclasses.replace(late, sit_out=SitOut(ints(3), ints(17), ints(5)))
    check_equal(decoder(DrawEdits).decode(encode_draw_edits(late)), late)


def test_edits_of_logits_travel_without_their_code():
    edits = (LogitsEdit((3,), abs, print, is_scaled=True), LogitsEdit((2, -1, 4), abs, print, is_batched=True))
    found = decoder(DrawEdits).decode(encode_draw_edits(DrawEdits(NO_INTS, NO_INTS.reshape(0, 4), edits=edits))).edits
    assert [(each.rows, each.is_scaled, each.is_batched) for each in found] == [
        ((3,), True, False),
        ((2, -1, 4), False, True),
    ]
    with pytest.raises(AssertionError, match="rank 0 only"):
        found[0].run(None)


def test_numbers_of_numpy():
    params = SamplingParams(temperature=np.float64(0.5))
    admitted = (Admission(1, 2, 3, 3, 0, params, 1, 0, (), None),)
    plan = StepPlan(0, NO_INTS, admitted, *(NO_INTS,) * 6, new_pages=())
    assert decoder(StepPlan).decode(encode(plan)).admitted[0].params.temperature == 0.5
