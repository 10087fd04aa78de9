"""Decisions: typed questions about one input, each answered by one step of a model that generates.

The options of a question have letters, each a single token, and the probabilities of an answer are those of the
letters as the first token of the model's reply. The prompts of all questions begin with the same token ids, those of
the input, which are made once; with prefix caching they are computed once too.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from slipstream.base.errors import InvalidParams, InvalidPrompt, SlipstreamError
from slipstream.base.typed import InnerFields, Mismatch, convert, doc, wanted
from slipstream.front.inputs import InputProcessor, Message
from slipstream.front.results import Logprob
from slipstream.params.sampling import SamplingParams
from slipstream.parsers.families import reasoning_of
from slipstream.parsers.output_parser import HarmonyFormat
from slipstream.text.chat_template import reasoning_switch
from slipstream.text.guarded import plain
from slipstream.text.tokenizer import Tokenizer

MAX_OPTIONS = 255
MAX_TOKENS = 2**23  # of the prompts of all questions, each of which has the input: 67 MB


class QuestionText(InnerFields, tag="input_text"):
    text: str


class QuestionJson(InnerFields, tag="input_json"):
    data: dict[str, Any] | list[dict[str, Any]]

    @property
    def text(self) -> str:
        return json_text(self.data)


Instructions = Annotated[str | list[QuestionText | QuestionJson], doc("the question, a text or parts")]
Name = Annotated[str | None, doc("given back with the answer")]


class PredicateQuestion(InnerFields, kw_only=True, tag="predicate"):
    """Asks whether something is true of the input."""

    instructions: Instructions
    name: Name = None


class ChoiceValue(InnerFields):
    value: str | bool
    description: str | None = None


class ChoiceQuestion(InnerFields, kw_only=True, tag="choice"):
    """Asks which of several values fits the input."""

    instructions: Instructions
    choices: Annotated[
        list[ChoiceValue],
        wanted(f"a list of 2 to {MAX_OPTIONS} objects with a value", min_length=2, max_length=MAX_OPTIONS),
    ]
    name: Name = None


class ScoreLevel(InnerFields):
    label: str
    description: str | None = None


class ScoreQuestion(InnerFields, kw_only=True, tag="score"):
    """Asks where the input is on a scale of ordered levels."""

    instructions: Instructions
    levels: Annotated[
        list[ScoreLevel],
        wanted(f"a list of 2 to {MAX_OPTIONS} objects with a label", min_length=2, max_length=MAX_OPTIONS),
    ]
    name: Name = None


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class PredicateAnswer(msgspec.Struct, tag="predicate"):
    name: str | None
    probability: float  # that it is true


class ValueProbability(msgspec.Struct):
    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, tag="choice"):
    name: str | None
    choice: str | bool  # the likeliest
    confidence: float  # the probability of its letter among all tokens
    probabilities: list[ValueProbability]


class LevelProbability(msgspec.Struct):
    value: int  # the index of the level
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct, tag="score"):
    name: str | None
    score: float  # the mean of the levels' indices
    confidence: float  # the probability of the likeliest level's letter among all tokens
    probabilities: list[LevelProbability]


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


def read_questions(given: Any) -> list[Question]:
    """The questions of a call from Python: objects of these classes, or dictionaries of the same form."""
    try:
        questions: list[Question] = convert(Annotated[list[Question], msgspec.Meta(min_length=1)], given, "questions")
    except Mismatch as error:
        raise InvalidParams(str(error), param=error.path, code=error.code) from None
    return questions


# The prompts: the conversation, and behind its last message a question.

_ASK = "Answer the question with the letter of one option"  # ends within a sentence: every tokenizer splits there
_ONLY = " only."
_LETTERS = [*string.ascii_uppercase, *map("".join, itertools.product(string.ascii_uppercase, repeat=2))]


class Decisions:
    """The prompts of questions about one input, the parameters of each, and the answers."""

    def __init__(self, inputs: InputProcessor, given: str | Sequence[Message], questions: Sequence[Question]) -> None:
        """`given`: the input, a text or the messages of a conversation."""
        name, tokenizer = inputs.description.name, inputs.tokenizer
        if (mode := inputs.description.logprobs_mode) not in ("raw_logprobs", "processed_logprobs"):
            raise InvalidParams(f"decisions are read from logprobs, and logprobs_mode of {name} is {mode}")
        self.questions = questions
        rendered = _rendered(inputs, [{"role": "user", "content": given}] if isinstance(given, str) else given)
        assert tokenizer is not None, "a chat template needs a tokenizer"
        inputs.check_length(rendered)
        if (start := plain(rendered).rfind(_ASK + _ONLY)) < 0:
            raise InvalidPrompt(f"the chat template of {name} changes the text of messages; use another model")
        start += len(_ASK)
        reply = plain(rendered)[start + len(_ONLY) :]  # what the template writes behind the question
        options = list(map(_options, questions))
        labels = _labels(tokenizer, reply, max(map(len, options)))
        texts = [
            inputs.before_reply(f"{_ASK}{_ONLY}\n\n{_text(each.instructions)}\n{_listed(own, labels)}", reply)
            for each, own in zip(questions, options, strict=True)
        ]
        before, *asked = tokenizer.encode_batch([_ASK, *texts], add_special_tokens=False)
        if any(ids[: len(before)] != before for ids in asked):
            raise InvalidPrompt(f"the tokenizer of {name} does not split between words; use another model")
        shared = tokenizer.encode(rendered[:start], add_special_tokens=False)
        if (total := len(shared) * len(asked) + sum(map(len, asked))) > MAX_TOKENS:
            fact = f"{len(asked)} questions about an input of {len(shared):,} tokens are {total:,} tokens"
            raise InvalidParams(f"{fact}, the limit is {MAX_TOKENS:,}; ask fewer at once", param="questions")
        self.prompts = [shared + ids[len(before) :] for ids in asked]
        self._ids = [[token for _, token in labels[: len(own)]] for own in options]

    def params(self, **more: Any) -> list[SamplingParams]:
        """`more`: priority, cache_salt."""
        first = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, **more)
        return [first.with_changes(logprob_token_ids=ids) for ids in self._ids]

    def answers(self, entries: Sequence[Mapping[int, Logprob]]) -> list[Answer]:
        """`entries`: the logprobs of the token that each prompt drew."""
        return [
            _answer(question, [entry[token].logprob for token in ids])
            for question, ids, entry in zip(self.questions, self._ids, entries, strict=True)
        ]


def _rendered(inputs: InputProcessor, messages: Sequence[Message]) -> str:
    """The text of the conversation, with `_ASK` and `_ONLY` where the question belongs. The model does not reason."""
    *earlier, last = messages or [{}]
    asking, content = f"{_ASK}{_ONLY}", last.get("content")
    if last.get("role") != "user":
        messages = [*messages, {"role": "user", "content": asking}]
    elif isinstance(content, str):
        messages = [*earlier, {**last, "content": f"{content}\n\n{asking}"}]
    else:
        messages = [*earlier, {**last, "content": [*(content or ()), f"\n\n{asking}"]}]
    template = None if inputs.tokenizer is None else inputs.tokenizer.chat_template()
    switch = reasoning_switch(template)
    rendered = inputs.render_chat(messages, chat_template_kwargs=None if switch is None else {switch: False})
    settings = {} if inputs.tokenizer is None else inputs.tokenizer.settings
    reasoning = reasoning_of(template, inputs.reasoning_parser, settings)
    if isinstance(reasoning, HarmonyFormat) or (reasoning is not None and reasoning.is_open(plain(rendered))):
        fact = f"{inputs.description.name} begins its replies with reasoning, and a decision is the first token"
        raise InvalidPrompt(f"{fact}; use a model whose chat template can switch reasoning off")
    return rendered


def _labels(tokenizer: Tokenizer, reply: str, count: int) -> list[tuple[str, int]]:
    """The first `count` letters, or pairs of letters, that are one token at the beginning of a reply, and these
    tokens. `reply`: the text before it."""
    some = _LETTERS[:26] if count <= 26 else _LETTERS
    before, *each = tokenizer.encode_batch([f".{reply}{label}" for label in ("", *some)], False)
    found = {ids[-1]: label for label, ids in zip(some, each, strict=True) if ids[:-1] == before}
    if len(found) < count:
        raise InvalidParams(
            f"a question has {count} options, and the vocabulary {len(found)} letters and pairs of letters as single "
            f"tokens; give at most {len(found)} options",
            param="questions",
        )
    return [(label, token) for token, label in found.items()][:count]


def _options(question: Question) -> list[tuple[str, str | None]]:
    """The options of a question and their descriptions, as the model reads them."""
    match question:
        case PredicateQuestion():
            return [("Yes", None), ("No", None)]
        case ChoiceQuestion(choices=choices):
            if len({(type(each.value), each.value) for each in choices}) < len(choices):
                raise InvalidParams("two choices have the same value; give each once", param="questions")
            return [(_text(each.value), each.description) for each in choices]
        case ScoreQuestion(levels=levels):
            return [(each.label, each.description) for each in levels]


def _listed(options: Sequence[tuple[str, str | None]], labels: Sequence[tuple[str, int]]) -> str:
    return "\n".join(
        f"{label}. {text}" + (f": {description}" if description else "")
        for (text, description), (label, _) in zip(options, labels, strict=False)
    )


def _text(given: str | bool | list[QuestionText | QuestionJson]) -> str:
    if isinstance(given, bool):
        return json_text(given)
    if isinstance(given, str):
        return given
    return "".join([each.text for each in given])


def json_text(data: Any) -> str:
    """JSON as models read it."""
    return msgspec.json.encode(data).decode()


def _answer(question: Question, logprobs: Sequence[float]) -> Answer:
    """`logprobs`: of the options' letters."""
    if not (best := max(logprobs)) > -math.inf:
        raise SlipstreamError("none of the options has a probability above 0")
    weights = [math.exp(each - best) for each in logprobs]
    shares, confidence = [weight / math.fsum(weights) for weight in weights], math.exp(best)
    match question:
        case PredicateQuestion(name=name):
            return PredicateAnswer(name, shares[0])
        case ChoiceQuestion(name=name, choices=choices):
            values = [ValueProbability(each.value, share) for each, share in zip(choices, shares, strict=True)]
            return ChoiceAnswer(name, choices[logprobs.index(best)].value, confidence, values)
        case ScoreQuestion(name=name, levels=levels):
            mean = math.fsum(index * share for index, share in enumerate(shares))
            each = [
                LevelProbability(index, one.label, share)
                for index, (one, share) in enumerate(zip(levels, shares, strict=True))
            ]
            return ScoreAnswer(name, mean, confidence, each)
