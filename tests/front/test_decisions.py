"""Decisions: prompts and answers, against the same questions as whole prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from scripted_core import facts
from slipstream import LLM, SamplingParams
from slipstream.base.errors import InvalidParams, InvalidPrompt
from slipstream.front import decisions
from slipstream.front.decisions import (
    ChoiceAnswer,
    ChoiceQuestion,
    ChoiceValue,
    Decisions,
    PredicateAnswer,
    PredicateQuestion,
    ScoreAnswer,
    ScoreLevel,
    ScoreQuestion,
    read_questions,
)
from slipstream.front.inputs import InputProcessor
from slipstream.text.tokenizer import Tokenizer
from tiny import write_tiny
from tiny_tokenizer import IM_END

QUESTIONS = [
    PredicateQuestion(instructions="Is it late?", name="late"),
    ChoiceQuestion(instructions="Which?", choices=[ChoiceValue("a"), ChoiceValue(True, "not so"), ChoiceValue("true")]),
    ScoreQuestion(instructions="How?", levels=[ScoreLevel("low"), ScoreLevel("high", "very")], name="how"),
]
SMALL = dict(use_tqdm_on_load=False, max_model_len=512, page_size=4, num_pages=400, dtype="float64", num_threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **SMALL) as llm:
        yield llm


def shares(llm, text, letters):
    """The probabilities of letters as the next token, from the logprobs of the whole vocabulary."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, skip_reading_prefix_cache=True)
    (entry,) = llm.generate({"prompt_token_ids": llm.tokenizer.encode(text)}, params, False)[0].outputs[0].logprobs
    found = [math.exp(entry[ord(letter)].logprob) for letter in letters]
    return [each / sum(found) for each in found], max(found)


def asked(text, *options):
    lines = "\n".join(f"{letter}. {option}" for letter, option in zip("ABC", options, strict=False))
    ask = "Answer the question with the letter of one option only."
    return f"<|im_start|>user\nA note.\n\n{ask}\n\n{text}\n{lines}<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_has_the_probabilities_of_the_letters(llm):
    late, which, how = llm.decide("A note.", QUESTIONS)
    (yes, _), _ = shares(llm, asked("Is it late?", "Yes", "No"), "AB")
    assert isinstance(late, PredicateAnswer) and late.name == "late"
    assert late.probability == pytest.approx(yes, abs=1e-6)
    each, confidence = shares(llm, asked("Which?", "a", "true: not so", "true"), "ABC")
    assert isinstance(which, ChoiceAnswer) and which.name is None
    assert [each.value for each in which.probabilities] == ["a", True, "true"]
    assert [each.probability for each in which.probabilities] == pytest.approx(each, abs=1e-6)
    assert which.choice == ["a", True, "true"][each.index(max(each))]
    assert which.confidence == pytest.approx(confidence, abs=1e-6)
    (low, high), confidence = shares(llm, asked("How?", "low", "high: very"), "AB")
    assert isinstance(how, ScoreAnswer)
    assert [(each.value, each.label) for each in how.probabilities] == [(0, "low"), (1, "high")]
    assert how.score == pytest.approx(high, abs=1e-6)
    assert how.confidence == pytest.approx(confidence, abs=1e-6)


def rounded(answers):
    return json.loads(json.dumps(msgspec.to_builtins(answers)), parse_float=lambda text: round(float(text), 9))


def test_answers_do_not_depend_on_the_questions_beside(llm):
    together = llm.decide("A note.", QUESTIONS)
    assert rounded([llm.decide("A note.", [each])[0] for each in QUESTIONS]) == rounded(together)


def test_dictionaries_are_questions_too(llm):
    given = [
        {"type": "predicate", "instructions": [{"type": "input_text", "text": "Is it late?"}], "name": "late"},
        {"type": "choice", "instructions": "Which?", "choices": [
            {"value": "a"}, {"value": True, "description": "not so"}, {"value": "true"}]},
        {"type": "score", "instructions": "How?", "name": "how", "levels": [
            {"label": "low"}, {"label": "high", "description": "very"}]},
    ]  # fmt: skip
    assert rounded(llm.decide("A note.", given)) == rounded(llm.decide("A note.", QUESTIONS))


def test_the_input_is_computed_once(llm):
    llm.reset_prefix_cache()
    cache = llm.core.scheduler.cache
    before = cache.num_queries - cache.num_hits
    questions = [PredicateQuestion(instructions=f"Is it number {index}?") for index in range(20)]
    prompts = Decisions(llm.inputs, "A long note. " * 16, questions).prompts
    llm.decide("A long note. " * 16, questions)
    shared = len(prompts[0]) - len(asked("Is it number 0?", "Yes", "No"))
    computed = cache.num_queries - cache.num_hits - before
    assert shared > 150
    assert computed <= sum(map(len, prompts)) - 19 * shared


def test_a_conversation_ends_with_the_question(llm):
    parts = [{"type": "text", "text": "A note."}]
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    for messages, before in [
        ([*earlier, {"role": "user", "content": "A note."}], "A note.\n\n"),
        ([*earlier, {"role": "user", "content": parts}], "A note. \n\n"),  # parts are joined by spaces
        (earlier, ""),
    ]:
        (ids,) = Decisions(llm.inputs, messages, QUESTIONS[:1]).prompts
        text = llm.tokenizer.decode(ids, skip_special_tokens=False)
        begin = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        wanted = begin + asked("Is it late?", "Yes", "No").replace("A note.\n\n", before)
        assert text == wanted


CONTROL = ChoiceQuestion(
    instructions="<|im_end|> Which?", choices=[ChoiceValue("<|im_start|>"), ChoiceValue("b", "<|im_end|>")]
)


def test_control_tokens_in_a_question_are_text(llm):
    plain, given = Decisions(llm.inputs, "A note. <|im_end|>", [QUESTIONS[0], CONTROL]).prompts
    assert plain.count(IM_END) == given.count(IM_END) == 1
    assert "<|im_end|> Which?\nA. <|im_start|>\nB. b: <|im_end|>" in llm.tokenizer.decode(given, False)
    assert Decisions(llm.inputs, "A note.", [CONTROL]).prompts[0].count(IM_END) == 1


def test_prompts_have_the_tokens_of_their_whole_text(default_model):
    tokenizer = Tokenizer.load(default_model.path)
    inputs = InputProcessor(
        facts(Path(default_model.path), max_model_len=4096, vocab_size=tokenizer.vocab_size), tokenizer
    )
    many = ChoiceQuestion(instructions="Wo?\n", choices=[ChoiceValue(f"Ort {index}") for index in range(200)])
    for given in ("A note.", "  12 34\n\n ", "Žluťoučký kůň 🐎", "x" * 300):
        found = Decisions(inputs, given, [*QUESTIONS, many])
        for ids in found.prompts:
            text = tokenizer.decode(ids, skip_special_tokens=False)
            assert ids == tokenizer.encode(text, add_special_tokens=False)
        assert "\nAA. Ort 26\n" in text
        assert len(set(found.params()[-1].logprob_token_ids)) == 200


TWICE = ChoiceQuestion(instructions="a", choices=[ChoiceValue("a"), ChoiceValue("a")])
LONG = ScoreQuestion(instructions="a", levels=[ScoreLevel(str(index)) for index in range(40)])


@pytest.mark.parametrize(
    ("questions", "said"),
    [
        ([], "questions is a list; give a list of objects of type predicate, choice or score that is not empty"),
        ([{"type": "rank"}], "questions[0] is of type 'rank'"),
        ([{"type": "choice", "instructions": "", "choices": [{"value": "a"}]}], "give a list of 2 to 255 objects"),
        ([{"type": "predicate"}], "questions[0].instructions is missing"),
        ([{"type": "predicate", "instructions": "a", "threshold": 1}], "there is no field questions[0].threshold"),
        ([TWICE], "two choices have the same value"),
        ([LONG], "40 options, and the vocabulary 26 letters"),
    ],
)  # fmt: skip
def test_a_wrong_question_is_named(llm, questions, said):
    with pytest.raises(InvalidParams) as caught:
        llm.decide("A note.", questions)
    assert said in str(caught.value) and caught.value.param.startswith("questions")


def test_the_prompts_of_a_call_are_bounded(llm, monkeypatch):
    size = sum(map(len, Decisions(llm.inputs, "A note.", QUESTIONS).prompts))
    monkeypatch.setattr(decisions, "MAX_TOKENS", 2 * size)
    assert len(llm.decide("A note.", QUESTIONS)) == 3
    with pytest.raises(InvalidParams, match="ask fewer at once"):
        llm.decide("A note.", QUESTIONS * 4)


def inputs_with(folder, template, **more):
    tokenizer = Tokenizer.load(folder)
    tokenizer.chat_templates["default"] = template
    return InputProcessor(facts(folder, max_model_len=512, **more), tokenizer)


CONTENT = "{% for message in messages %}{{ message.role }}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "more", "said"),
    [
        (CONTENT.replace("content }}", "content | upper }}"), {}, "changes the text of messages"),
        (CONTENT + "<think>{# </think> #}", {}, "begins its replies with reasoning"),
        (CONTENT, {"logprobs_mode": "raw_logits"}, "logprobs_mode of tiny is raw_logits"),
    ],
)
def test_a_model_that_cannot_decide_says_why(folder, template, more, said):
    with pytest.raises((InvalidPrompt, InvalidParams), match=said):
        Decisions(inputs_with(folder, template, **more), "A note.", QUESTIONS)


def test_reasoning_is_switched_off(folder):
    template = CONTENT + "{% if enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"
    (ids,) = Decisions(inputs_with(folder, template), "A note.", QUESTIONS[:1]).prompts
    assert bytes(ids).endswith(b"<think></think>")


def test_questions_are_read_back_as_json():
    text = json.dumps({"type": "predicate", "instructions": [{"type": "input_json", "data": {"a": [1]}}]})
    (question,) = read_questions([json.loads(text)])
    assert question.instructions[0].text == '{"a":[1]}'
