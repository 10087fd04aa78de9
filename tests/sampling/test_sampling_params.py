"""Every sampling parameter from the outside: what a caller asks for is what comes back."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict

import pytest

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.base.errors import InvalidParams
from tiny import VOCAB_SIZE, write_tiny
from tiny_tokenizer import END_OF_TEXT, IM_START

SMALL = dict(use_tqdm_on_load=False, max_model_len=96, num_pages=64, max_num_seqs=8, num_threads=1)
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47, 48]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "llama")
    with LLM(str(folder), dtype="float64", max_num_batched_tokens=16, depth=1, page_size=4, **SMALL) as llm:
        yield llm


def one(llm, params, prompt=PROMPT, **arguments):
    return llm.generate([prompt], params, **arguments)[0]


def test_prompt_logprobs_are_what_generation_said(llm):
    """The tokens of an answer, given as a prompt, get the logprobs they were drawn with."""
    told = one(llm, GREEDY.with_changes(logprobs=4))
    drawn = told.outputs[0]
    again = one(llm, GREEDY.with_changes(prompt_logprobs=4, max_tokens=1), PROMPT + drawn.token_ids)
    assert again.prompt_logprobs[0] is None
    assert len(again.prompt_logprobs) == len(PROMPT) + len(drawn.token_ids)
    for token, one_way, other in zip(
        drawn.token_ids, drawn.logprobs, again.prompt_logprobs[len(PROMPT) :], strict=True
    ):
        assert next(iter(other)) == token
        assert one_way.keys() == other.keys()
        for key in other:
            assert math.isclose(one_way[key].logprob, other[key].logprob, abs_tol=1e-9)
            assert one_way[key].rank == other[key].rank and one_way[key].decoded_token == other[key].decoded_token


def test_prompt_logprobs_of_a_cached_prompt(llm):
    first = one(llm, GREEDY.with_changes(prompt_logprobs=1))
    second = one(llm, GREEDY.with_changes(prompt_logprobs=1))
    assert second.num_cached_tokens == 0 and len(second.prompt_logprobs) == len(PROMPT)
    assert [set(e or ()) for e in first.prompt_logprobs] == [set(e or ()) for e in second.prompt_logprobs]


def test_prompt_logprobs_stream_complete_from_the_first_token_on(llm):
    long = list(range(10, 60))  # some chunks
    for result in llm.stream(long, GREEDY.with_changes(prompt_logprobs=0)):
        assert len(result.prompt_logprobs) == len(long) and result.outputs[0].token_ids


def test_the_whole_vocabulary(llm):
    params = GREEDY.with_changes(logprobs=-1, prompt_logprobs=-1, max_tokens=3)
    result = one(llm, params)
    for step in [*result.outputs[0].logprobs, *result.prompt_logprobs[1:]]:
        assert sorted(step) == list(range(VOCAB_SIZE))
        assert math.isclose(sum(math.exp(entry.logprob) for entry in step.values()), 1.0, rel_tol=1e-9)
        assert sorted(entry.rank for entry in step.values()) == list(range(1, VOCAB_SIZE + 1))


def test_given_ids_come_with_every_token_asked_for_logprobs_or_not(llm):
    whole = one(llm, GREEDY.with_changes(logprobs=-1)).outputs[0]
    for logprobs in (None, 2):
        sample = one(llm, GREEDY.with_changes(logprobs=logprobs, logprob_token_ids=[300, 5, 5])).outputs[0]
        assert sample.token_ids == whole.token_ids
        for step, token, all_of_them in zip(sample.logprobs, sample.token_ids, whole.logprobs, strict=True):
            assert list(step)[0] == token and {300, 5} <= set(step)
            assert len(step) <= 3 + (logprobs or 0)
            assert all(math.isclose(step[t].logprob, all_of_them[t].logprob, abs_tol=1e-9) for t in step)


def test_bias_and_allowed_ids_choose_the_token(llm):
    plain = one(llm, GREEDY).outputs[0].token_ids
    assert one(llm, GREEDY.with_changes(logit_bias={17: 100.0})).outputs[0].token_ids == [17] * 8
    banned = one(llm, GREEDY.with_changes(logit_bias={plain[0]: -100.0})).outputs[0].token_ids
    assert plain[0] not in banned
    loose = SamplingParams(temperature=9.0, allowed_token_ids=[3, 4, 5], max_tokens=30)
    narrow = one(llm, loose).outputs[0].token_ids
    assert set(narrow) <= {3, 4, 5} and len(set(narrow)) > 1


def test_bad_words_are_kept_out_of_the_text(llm):
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True, allowed_token_ids=list(b"abc "))
    assert "ab" in one(llm, params).outputs[0].text
    text = one(llm, params.with_changes(bad_words=["ab", " cc"])).outputs[0].text
    assert "ab" not in text and "cc" not in text and len(text) == 60
    # a word that the prompt has begun may not be completed either
    begun = params.with_changes(bad_words=["ab"], max_tokens=1)
    assert "b" not in [one(llm, begun.with_changes(seed=seed), "xa").outputs[0].text for seed in range(9)]


def test_draws_with_bad_words_have_the_distribution_without_them(llm):
    """Words of one to three tokens: a token that completes one is never drawn, and the others are drawn as often as
    their renormalised probabilities say, at each step given the tokens before."""
    letters = list(b"abcd")
    words = ["d", "ab", "bca"]
    ask = SamplingParams(max_tokens=3, ignore_eos=True, allowed_token_ids=letters, temperature=0.7)
    prompt = [90, ord("b"), 92, ord("a")]  # "ab" has begun
    counts = defaultdict(Counter)
    for sample in one(llm, ask.with_changes(n=600, seed=3, bad_words=words), prompt).outputs:
        for place, token in enumerate(sample.token_ids):
            counts[tuple(sample.token_ids[:place])][token] += 1
    chi_square = freedom = 0.0
    for begun, drawn in counts.items():
        text = "a" + bytes(begun).decode()
        allowed = [t for t in letters if not any((text + chr(t)).endswith(word) for word in words)]
        assert drawn.keys() <= set(allowed), (text, drawn)
        if drawn.total() < 40:
            continue
        entries = one(llm, ask.with_changes(max_tokens=1, logprobs=-1), [*prompt, *begun]).outputs[0].logprobs[0]
        weights = {t: math.exp(entries[t].logprob / 0.7) for t in allowed}
        means = {t: weight / sum(weights.values()) * drawn.total() for t, weight in weights.items()}
        chi_square += sum((drawn[t] - expected) ** 2 / expected for t, expected in means.items())
        freedom += len(means) - 1
    assert freedom > 6 and abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


def test_priority_and_salt_are_arguments_too_and_those_win(llm):
    params = SamplingParams(priority=3, cache_salt="mine")
    message, _ = llm.inputs.prepare("a", PROMPT, params)
    assert (message.priority, message.cache_salt) == (3, "mine")
    message, _ = llm.inputs.prepare("a", PROMPT, params, priority=0, cache_salt="")
    assert (message.priority, message.cache_salt) == (0, "")
    message, _ = llm.inputs.prepare("a", {"prompt_token_ids": PROMPT, "cache_salt": "yours"}, params)
    assert message.cache_salt == "yours"
    prompt = [90, 91, 92, 93, 94, 95, 96, 97, 98]
    assert one(llm, GREEDY, prompt, cache_salt="one", priority=[2]).num_cached_tokens == 0
    assert one(llm, GREEDY, prompt, cache_salt="two").num_cached_tokens == 0
    assert one(llm, GREEDY.with_changes(cache_salt="two"), prompt).num_cached_tokens == 8
    with pytest.raises(InvalidParams, match="priority is 'high'"):
        one(llm, GREEDY, priority="high")
    with pytest.raises(InvalidParams, match="cache_salt is 5"):
        one(llm, GREEDY, cache_salt=5)


def test_a_long_prompt_may_be_cut(llm):
    result = one(llm, GREEDY.with_changes(truncate_prompt_tokens=4, prompt_logprobs=0))
    assert result.prompt_token_ids == PROMPT[-4:] and len(result.prompt_logprobs) == 4
    assert result.outputs[0].token_ids == one(llm, GREEDY, PROMPT[-4:]).outputs[0].token_ids
    assert one(llm, GREEDY.with_changes(truncate_prompt_tokens=400)).prompt_token_ids == PROMPT
    whole = one(llm, GREEDY.with_changes(truncate_prompt_tokens=-1), [1, 2, 3] * 100)
    assert whole.prompt_token_ids == ([1, 2, 3] * 100)[-95:] and len(whole.outputs[0].token_ids) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_shown_when_asked_for(llm, stream):
    params = GREEDY.with_changes(allowed_token_ids=[65, END_OF_TEXT, IM_START], temperature=1.0, seed=4, max_tokens=12)

    def text(params):
        if stream:
            return list(llm.stream(PROMPT, params))[-1].outputs[0].text
        return one(llm, params).outputs[0].text

    assert set(text(params)) == {"A"}
    shown = text(params.with_changes(skip_special_tokens=False))
    assert "<|im_start|>" in shown and shown.replace("<|im_start|>", "").replace("<|endoftext|>", "") == text(params)
    assert text(params.with_changes(skip_special_tokens=False, spaces_between_special_tokens=False)) == shown


def test_no_text_when_none_is_wanted(llm):
    sample = one(llm, GREEDY.with_changes(detokenize=False, logprobs=1)).outputs[0]
    assert sample.text == "" and sample.token_ids == one(llm, GREEDY).outputs[0].token_ids
    assert all(entry.decoded_token is None for step in sample.logprobs for entry in step.values())


def test_a_stop_token_is_in_the_text_when_stops_are(llm):
    params = GREEDY.with_changes(allowed_token_ids=[66], stop_token_ids=[66])
    assert one(llm, params).outputs[0].text == ""
    assert one(llm, params.with_changes(include_stop_str_in_output=True)).outputs[0].text == "B"


def test_parameters_that_forbid_every_token_end_that_request_alone(llm):
    hopeless = GREEDY.with_changes(allowed_token_ids=[66], bad_words=["B"])
    results = llm.generate([PROMPT, PROMPT], [hopeless, GREEDY])
    assert results[0].outputs[0].finish_reason == "error" and "forbid every token" in results[0].outputs[0].stop_reason
    assert results[1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (dict(logit_bias={100000: 1.0}), "logit_bias has 100000"),
        (dict(allowed_token_ids=[1, 100000]), "allowed_token_ids has 100000"),
        (dict(logprob_token_ids=[100000]), "logprob_token_ids has 100000"),
        (dict(prompt_logprobs=100000), "prompt_logprobs is 100000"),
        (dict(bad_words=["x" * 33]), "33 tokens, the limit is 32"),
        (dict(bad_words=[f"{i:032}" for i in range(1100)]), "the limit is 32768"),
        (dict(logprobs=-1, n=1024, max_tokens=None), "lower logprobs"),
    ],
)
def test_what_the_model_cannot_do_is_refused(llm, params, says):
    with pytest.raises(InvalidParams, match=says):
        one(llm, SamplingParams(**params))
    assert len(one(llm, GREEDY).outputs[0].token_ids) == 8


def test_absurd_reports_are_refused_with_numbers(llm):
    with pytest.raises(InvalidParams, match=r"27,082,752.*GiB.*16,777,216"):
        one(llm, SamplingParams(logprobs=-1, n=1024, max_tokens=87))


def test_lists_as_long_as_the_vocabulary_never_overflow_a_step(tmp_path):
    """Each of these fits the upload arena alone; many at once would not, and wait their turn."""
    vocab = 20_000
    config = dict(
        architectures=["LlamaForCausalLM"], hidden_size=16, num_attention_heads=1, num_hidden_layers=1,
        intermediate_size=16, max_position_embeddings=64, vocab_size=vocab,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    everything = list(range(vocab))
    heavy = SamplingParams(
        temperature=0,
        max_tokens=4,
        min_tokens=2,
        stop_token_ids=everything[:-1],
        allowed_token_ids=everything,
        logit_bias=dict.fromkeys(everything, 0.5),
        logprob_token_ids=everything,
        presence_penalty=0.1,
    )
    options = dict(load_format="dummy", skip_tokenizer_init=True, use_tqdm_on_load=False, num_threads=1)
    with LLM(str(tmp_path), **options, max_num_seqs=8, max_model_len=64, num_pages=64, depth=1) as llm:
        arena = llm.core.executor.ring.capacity
        assert arena < 8 * 4 * 6 * vocab  # so the test can fail
        many_stops = SamplingParams(temperature=0, max_tokens=3, min_tokens=2, stop_token_ids=everything[:-1])
        results = llm.generate([[i] * 20 for i in range(16)], [heavy] * 4 + [many_stops] * 12)
        for result in results:
            # the one token that is no stop id, until an end is allowed
            assert result.outputs[0].token_ids[:2] == [vocab - 1] * 2


def test_a_parameter_that_does_not_exist_is_named_with_the_nearest() -> None:
    with pytest.raises(InvalidParams, match="SamplingParams has no temprature; did you mean temperature?"):
        SamplingParams(temprature=0.5)
    with pytest.raises(InvalidParams, match="SamplingParams has no beams; there are n, presence_penalty, "):
        SamplingParams(beams=3)
    with pytest.raises(InvalidParams, match="did you mean top_k?"):
        SamplingParams().with_changes(topk=3)
    with pytest.raises(InvalidParams, match="StructuredOutputsParams has no chioce; did you mean choice?"):
        StructuredOutputsParams(chioce=["a"])
