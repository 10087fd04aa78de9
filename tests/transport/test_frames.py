"""Frames: any bytes, in pieces of any size, decode to whole messages or raise FrameError."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.base.errors import InvalidParams, PromptTooLong, QueueFull
from slipstream.checkpoint.generation import GenerationDefaults
from slipstream.contracts.messages import Abort, Output, Pooled, Submit, SubmitAll
from slipstream.contracts.request import FinishReason
from slipstream.engine.model_description import ModelDescription
from slipstream.metrics.stats import LaneStats
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.transport.frames import (
    MAX_FRAME,
    AbortAll,
    AbortedAll,
    Failed,
    FrameError,
    Join,
    Loading,
    ModelDescriptions,
    Pulse,
    Ready,
    Refused,
    ResetPrefixCache,
    TooLarge,
    encoded,
    frame,
    frames,
    from_core_frames,
    to_core_frames,
    too_large_output,
)

FACTS = ModelDescription(
    name="m", tokenizer=None, chat_template=None, defaults=GenerationDefaults({"top_p": 0.5}, (3,)), max_model_len=8,
    max_positions=9, vocab_size=10,
)  # fmt: skip
TO_CORE = [
    Submit("a", [1, 2], SamplingParams(stop=["x"], logit_bias={3: 1.5}, seed=2**64 - 1, allowed_token_ids=[1]), 0.5),
    Submit("b", [0], PoolingParams(), 1.0, -5, "salt", [[1], [2, 3]], 1, 1, "other"),
    SubmitAll([Submit("c", [1], SamplingParams(n=2), 0.5), Submit("d", [2, 3], PoolingParams(), 0.5)]),
    Abort("a"),
    Abort("b", 3),
    AbortAll("call"),
    AbortedAll("call", 7),
    ResetPrefixCache("call"),
]
KINDS = Submit | SubmitAll | Abort | AbortAll | AbortedAll | ResetPrefixCache | Join
FROM_CORE = [
    Output("a", 0, [7]),
    Output("a", 1, [7, 8], bytes(range(32)) * 2, FinishReason.STOP, 8, 4),
    Output("b", 0, [], error="no", prompt_logprobs=b"16 bytes of them"),
    Refused("a", "QueueFull", "full"),
    Loading("weights"),
    ModelDescriptions([FACTS], 77),
    Ready(),
    Pulse([LaneStats("one", 1, 2, 3, 4, 5, 6), LaneStats("two", busy=0.5)]),
    Failed("RuntimeError: boom"),
    AbortAll("call"),
    AbortedAll("call", 0),
    ResetPrefixCache("call"),
]


@pytest.mark.parametrize(("messages", "reading"), [(TO_CORE, to_core_frames), (FROM_CORE, from_core_frames)])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_messages_arrive_in_order_however_the_bytes_are_cut(messages, reading, data):
    sent = data.draw(st.lists(st.lists(st.sampled_from(messages), max_size=4), max_size=4))
    stream = b"".join(map(frame, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, got = reading(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.push(stream[start:stop])
    assert got == [message for batch in sent for message in batch]


def test_vectors_cross_as_bytes():
    vector = np.linspace(0, 1, 5, dtype=np.float32)
    (output,) = from_core_frames().push(frame([Output("a", 0, [], pooled=Pooled.of(vector))]))
    assert output.pooled is not None and (output.pooled.array() == vector).all()


@pytest.fixture
def small_frames(monkeypatch):
    monkeypatch.setattr("slipstream.transport.frames.MAX_FRAME", 1000)


def pooled(name: str, count: int) -> Output:
    return Output(name, 0, [], pooled=Pooled.of(np.arange(count, dtype=np.float32)))


@given(sizes=st.lists(st.integers(0, 240), max_size=20))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_messages_larger_than_a_frame_are_sent_in_several(small_frames, sizes):
    outputs = [pooled(str(place), size) for place, size in enumerate(sizes)]
    parts = list(frames(outputs))
    assert all(len(part) <= 1004 for part in parts)
    got = from_core_frames().push(b"".join(parts))
    assert [(one.request_id, len(one.pooled.array())) for one in got] == [(str(i), n) for i, n in enumerate(sizes)]


def test_an_output_larger_than_a_frame_becomes_an_error_and_the_others_arrive(small_frames):
    outputs = [pooled("a", 10), pooled("b", 300), pooled("c", 10)]
    got = from_core_frames().push(b"".join(frames(outputs, too_large_output)))
    assert [one.request_id for one in got] == ["a", "b", "c"]
    assert got[1].pooled is None and got[1].finish_reason is FinishReason.ERROR and "1000 can be sent" in got[1].error
    assert got[0].pooled is not None and got[2].pooled is not None
    with pytest.raises(TooLarge):
        list(frames(outputs))


def test_messages_encoded_one_by_one_are_the_same_frame(small_frames):
    assert to_core_frames().push(frame([encoded(message) for message in TO_CORE])) == TO_CORE
    with pytest.raises(TooLarge):
        encoded(Submit("a", [0] * 1000, PoolingParams(), 0.0))


def test_numbers_and_texts_of_other_kinds_are_sent_as_plain_ones():
    class Text(str):
        pass

    given = SamplingParams(temperature=np.float64(0.5), stop=[Text("x")], cache_salt=Text("y"))
    (found,) = to_core_frames().push(frame([encoded(Submit("a", [1], given, 0.0))]))
    assert found.params == SamplingParams(temperature=0.5, stop=["x"], cache_salt="y")
    with pytest.raises(TypeError, match="object is not a number or a string"):
        encoded(Submit("a", [1], SamplingParams(), 0.0, cache_salt=object()))


@given(data=st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_any_bytes_give_messages_or_a_frame_error(data):
    for reader in (to_core_frames(), from_core_frames()):
        try:
            reader.push(len(data).to_bytes(4, "little") + data)
            reader.push(data)
        except FrameError:
            pass


@given(place=st.integers(4, 200), byte=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_changed_byte_never_gives_anything_but_messages(place, byte):
    good = bytearray(frame(TO_CORE))
    good[place % (len(good) - 4) + 4] = byte
    try:
        assert all(isinstance(message, KINDS) for message in to_core_frames().push(bytes(good)))
    except FrameError:
        pass


def test_a_frame_length_above_the_limit_is_an_error():
    with pytest.raises(FrameError, match="has the length"):
        to_core_frames().push((MAX_FRAME + 1).to_bytes(4, "little"))


def test_messages_of_the_other_direction_and_of_nothing_are_refused():
    for bad in (Ready(), SubmitAll([])):
        with pytest.raises(FrameError):
            to_core_frames().push(frame([bad]))
    with pytest.raises(FrameError):
        from_core_frames().push(frame([Abort("a")]))


def test_parameters_are_checked_again_on_arrival():
    bad = frame([Submit("a", [1], SamplingParams(top_k=77), 0.0)]).replace(b"top_k\x4d", b"top_k\xf7")
    with pytest.raises(FrameError, match="top_k"):
        to_core_frames().push(bad)


def test_a_refusal_is_our_exception_again_and_nothing_else():
    assert type(Refused.of("a", QueueFull("full")).error()) is QueueFull
    wrong = Refused.of("a", InvalidParams("wrong", param="structured_outputs")).error()
    assert isinstance(wrong, InvalidParams) and wrong.param == "structured_outputs"
    assert str(Refused.of("a", PromptTooLong("long")).error()) == "long"
    for kind in ("Exception", "SystemExit", "ValueError", "annotations", "nothing"):
        assert type(Refused("a", kind, "x").error()) is RuntimeError
