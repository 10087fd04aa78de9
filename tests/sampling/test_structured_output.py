"""Structured output of a model with random weights: valid, whatever else is asked; wrong shapes are errors at once."""

from __future__ import annotations

import json
import random
import re

import jsonschema_rs
import pytest

from mask_gate import DraftGate, MaskGate
from repeats import slow
from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.base.errors import InvalidParams
from slipstream.params.structured import BACKENDS
from slipstream.record.plan_checker import PlanChecker
from slipstream.record.record_file import decode
from slipstream.scheduler.grammar import mask_pool
from slipstream.serve.cli.main import main
from tiny import write_tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
PROMPTS = [[5, 6, 7], [200, 201], [9] * 20]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module", params=[slow(0), 1, slow(2)])
def llm(request, model):
    with LLM(model, depth=request.param, use_tqdm_on_load=False, max_model_len=256, num_threads=1) as llm:
        yield llm


def generate(llm, shape, **params):
    asked = SamplingParams(**{"temperature": 1.0, "max_tokens": 200, "structured_outputs": shape} | params)
    return [sample for result in llm.generate(PROMPTS, asked, use_tqdm=False) for sample in result.outputs]


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0}, {"n": 3}, {"repetition_penalty": 1.5, "frequency_penalty": 1.0}, {"logprobs": 2},
     {"ignore_eos": True}, {"top_k": 1, "min_p": 0.5}, {"min_tokens": 150}, {"bad_words": ["red"]}],
    ids=str,
)  # fmt: skip
def test_json_is_valid_under_its_schema(llm, params):
    samples = generate(llm, StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), **params)
    for sample in samples:
        assert sample.finish_reason == "stop", sample
        jsonschema_rs.validate(SCHEMA, json.loads(sample.text))
        assert "bad_words" not in params or "red" not in sample.text


@pytest.mark.skipif(mask_pool.load() is None, reason="no C compiler")
def test_rows_whose_masks_are_late_sit_out_steps_and_draw_the_same_tokens(llm, monkeypatch, tmp_path):
    check_late_masks(llm, monkeypatch)
    llm.save_record(tmp_path / "record")
    recording = decode((tmp_path / "record").read_bytes(), "record")
    assert any(step.late is not None and step.late.sit_out is not None for step in recording.steps)
    assert main(["replay", str(tmp_path / "record"), "--json"]) == 0
    owners = {each.row: each for each in recording.generated}
    for first, step in enumerate(recording.steps):  # a recording may begin anywhere
        checker = PlanChecker(recording.config, owners.values())
        for each in recording.steps[first : first + 8]:
            checker.run(each)
        for row in step.plan.released.tolist():
            del owners[row]
        owners |= {each.row: each for each in step.plan.all_admitted}


@pytest.mark.cuda
@pytest.mark.skipif(mask_pool.load() is None, reason="no C compiler")
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "mamba", "mamba2"])
def test_rows_sit_out_steps_on_a_gpu(family, tmp_path, monkeypatch):
    model = str(write_tiny(tmp_path, family))
    options = dict(device="cuda", dtype="float32", deterministic=family == "llama", max_model_len=256)
    with LLM(model, **options, use_tqdm_on_load=False) as llm:
        check_late_masks(llm, monkeypatch)


def make_masks_late(core, monkeypatch, seed=0):
    """Many masks that are not remembered come late, by chance. Returns a list of the rows that sit out, which grows."""
    dice, sat = random.Random(seed), []
    gates = [gate(monkeypatch, lambda _: dice.random() < 0.5) for gate in (MaskGate, DraftGate)]
    close_pool(core)  # the next one has the gate
    step, sit_out = core.step, core.scheduler.sit_out

    def step_and_pass():
        monkeypatch.setattr(core.constraints, "min_budget", dice.choice([0.0, 0.01]))  # a late row is not slow for ever
        outputs = step()
        for gate in gates:
            gate.let_pass()
        return outputs

    monkeypatch.setattr(core, "step", step_and_pass)
    monkeypatch.setattr(core.scheduler, "sit_out", lambda *given: sat.append(given) or sit_out(*given))
    return sat


def close_pool(core):
    if core.constraints._pool is not None:
        core.constraints._pool.close()
        core.constraints._pool = None


@pytest.mark.skipif(mask_pool.load() is None, reason="no C compiler")
@pytest.mark.parametrize("drafts", [None, "ngram:3"])
@pytest.mark.parametrize(
    "asked", [dict(frequency_penalty=1.5), dict(bad_words=["ab", "bc", "cd", "de", "ea"])], ids=str
)
def test_tokens_of_rows_that_sit_out_are_counted_once_where_heads_are_not_captured(model, monkeypatch, asked, drafts):
    options = dict(max_model_len=256, num_threads=1, use_tqdm_on_load=False)
    asked = dict(logprob_token_ids=[5], **asked)  # which no captured head reports
    with LLM(model, **options, drafts=drafts) as llm:
        check_late_masks(llm, monkeypatch, StructuredOutputsParams(regex="[a-e]{60}"), **asked)


def check_late_masks(llm, monkeypatch, shape=None, **more):
    shape = shape or StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    asked = (more or dict(repetition_penalty=1.3, frequency_penalty=0.5)) | dict(seed=3, logprobs=1)
    wanted = generate(llm, shape, **asked)
    sat = make_masks_late(llm.core, monkeypatch)
    found = generate(llm, shape, **asked)
    assert len(sat) > 2
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, rel=1e-4)
    close_pool(llm.core)


@pytest.mark.skipif(mask_pool.load() is None, reason="no C compiler")
def test_a_row_that_sits_out_has_no_drafts_of_before(tmp_path, monkeypatch):
    """Their masks were those along the drafts of the padding row, so a forbidden token was drawn."""
    prompts = [[i + 3, *range(20, 20 + 7 * i), i + 5] for i in range(8)]
    shape = StructuredOutputsParams(regex="[a-f]{3,9}(, [0-9]{2}){2,5}")
    asked = SamplingParams(temperature=0, structured_outputs=shape, max_tokens=30)
    options = dict(use_tqdm_on_load=False, max_model_len=128, num_threads=1, depth=0)
    model = str(write_tiny(tmp_path, "qwen3", head_dim=64))

    def tokens(llm):
        both = [asked, asked.with_changes(temperature=0.9, seed=5, top_p=0.9)]
        return [each.outputs[0].token_ids for one in both for each in llm.generate(prompts, one, use_tqdm=False)]

    with LLM(model, **options) as llm:
        wanted = tokens(llm)
    with LLM(model, **options, drafts="ngram:3") as llm:
        llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
        assert tokens(llm) == wanted
        num_sat = 0
        for seed in range(3):
            with monkeypatch.context() as patched:
                sat = make_masks_late(llm.core, patched, seed)
                assert tokens(llm) == wanted
                num_sat += len(sat)
                close_pool(llm.core)
        assert num_sat and llm.core.scheduler.drafts.counts.num_accepted


def test_waiting_for_masks_is_counted_as_such(llm):
    before = llm.core.timer.total.copy()
    llm.generate(PROMPTS, SamplingParams(max_tokens=4), use_tqdm=False)
    plain = llm.core.timer.total.since(before)
    generate(llm, {"regex": "[a-z]{5}"})
    masked = llm.core.timer.total.since(before)
    assert plain.grammar == 0 < masked.grammar


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_that_always_wants_a_forbidden_token_is_held_to_the_shape(llm, temperature):
    wanted = {token: 100.0 for token in range(llm.config.model.info.vocab_size) if token not in map(ord, "abc")}
    for sample in generate(llm, {"regex": "[abc]{4}x?"}, logit_bias=wanted, temperature=temperature):
        assert re.fullmatch("[abc]{4}x?", sample.text), sample


def test_other_shapes(llm):
    pattern = "[a-f]{3}-(x|yy)[0-9]{2}"
    assert all(re.fullmatch(pattern, sample.text) for sample in generate(llm, {"regex": pattern}))
    choices = ["left", "right", "straight on"]
    assert {sample.text for sample in generate(llm, {"choice": choices}, n=4)} <= set(choices)
    choices = [f"number {number}" for number in range(4096)]  # as many as there may be
    assert {sample.text for sample in generate(llm, {"choice": choices}, n=4)} <= set(choices)
    after = {"choice": choices, "prefix": 'start: "so: "'}
    assert {sample.text.removeprefix("so: ") for sample in generate(llm, after)} <= set(choices)
    for text in [sample.text for sample in generate(llm, {"grammar": 'root ::= "a" ("b" | "c")? "d"'})]:
        assert text in ("ad", "abd", "acd")
    samples = generate(llm, {"json_object": True, "whitespace_pattern": " ?"}, max_tokens=60)
    assert all(sample.text.startswith("{") for sample in samples)
    for sample in samples:
        assert sample.finish_reason == "length" or isinstance(json.loads(sample.text), dict)


def test_a_stop_string_ends_a_shape_early(llm):
    for sample in generate(llm, {"choice": ["one two three"]}, stop=["two"]):
        assert (sample.text, sample.finish_reason, sample.stop_reason) == ("one ", "stop", "two")


def test_structural_tags_bind_only_what_is_inside(llm):
    tag = {
        "structures": [{"begin": "<f=a>", "schema": {"const": 7}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    biased = {ord(letter): 100.0 for letter in "<f="}
    for sample in generate(llm, {"structural_tag": tag}, logit_bias=biased, max_tokens=40):
        for inside in re.findall("<f=(.*?)</f>", sample.text, re.S):
            assert inside == "a>7"


def test_structural_tags_as_formats(llm):
    call = {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"const": 7}}, "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [call], "at_least_one": True}
    form = {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-c]{2}"}, form]}
    for sample in generate(llm, {"structural_tag": {"type": "structural_tag", "format": form}}, max_tokens=40):
        assert re.match("[a-c]{2}<f=a>7</f>", sample.text)


def test_wrong_shapes_raise_and_the_engine_goes_on(llm):
    for shape, words in (
        ({"regex": "("}, "unclosed group"),
        ({"json": {"type": "strin"}}, "Invalid type"),
        ({"grammar": "start: (("}, "Expected"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"structural_tag": {"format": {}}}, "type of a format"),
        ({"structural_tag": {"format": {"type": "any_tokens"}}}, "any_tokens is not supported; use any_text"),
    ):
        for _ in range(2):  # compiled, then from the cache
            with pytest.raises(InvalidParams, match=re.escape(words)) as caught:
                generate(llm, shape)
            assert caught.value.param == "structured_outputs"
    assert {sample.text for sample in generate(llm, {"choice": ["ok"]})} == {"ok"}


def test_hostile_shapes_end_within_their_limits(llm):
    """The first takes minutes and gigabytes of memory in llguidance; the second only when its masks are made."""
    patterns = {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(24)]}
    with pytest.raises(InvalidParams, match="too complex"):
        generate(llm, {"json": patterns})
    for sample in generate(llm, {"regex": "(a{1,1000}){1,1000}"}, temperature=0, max_tokens=40):
        assert sample.finish_reason in ("error", "length", "stop")
    assert {sample.text for sample in generate(llm, {"choice": ["ok"]})} == {"ok"}


def test_streams_of_a_wrong_shape_raise(llm):
    with pytest.raises(InvalidParams, match="unclosed group"):
        list(llm.stream([5, 6], SamplingParams(structured_outputs={"regex": "(("})))


def test_an_engine_without_a_tokenizer_refuses(model):
    with (
        LLM(model, skip_tokenizer_init=True, use_tqdm_on_load=False, max_model_len=64, num_threads=1) as llm,
        pytest.raises(InvalidParams, match="tokenizer"),
    ):
        generate(llm, {"regex": "a"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "none is given"),
        ({"json": "{"}, "not JSON"),
        ({"json": [1]}, "give an object"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice are given"),
        ({"choice": "abc"}, "a list"),
        ({"choice": ["a"] * 5000}, "the limit is 4096"),
        ({"regex": "a" * 20000}, "the limit is 16384"),
        ({"regex": "a", "disable_any_whitespace": True}, "json and json_object only"),
        ({"json_object": 1}, "give True"),
        ({"jsn": {}}, "there is no jsn"),
        ({"regex": "a", "backend": "magic"}, "give one of auto, guidance"),
        ({"regex": "a", "backend": ["auto"]}, "give one of auto, guidance"),
    ],
)
def test_wrong_parameters_fail_where_they_are_built(given, words):
    with pytest.raises(InvalidParams, match=re.escape(words)) as caught:
        SamplingParams(structured_outputs=given)
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_of_vllm_changes_nothing(backend):
    assert StructuredOutputsParams(regex="a", backend=backend) == StructuredOutputsParams(regex="a")


def test_deep_schemas_fail_where_they_are_built():
    schema = {}
    for _ in range(80):
        schema = {"properties": {"a": schema}}
    with pytest.raises(InvalidParams, match="64 levels"):
        StructuredOutputsParams(json=schema)
    with pytest.raises(InvalidParams, match="too deeply"):
        StructuredOutputsParams(json="[" * 100000)
