"""Beam search: against every sequence of a small vocabulary, and against transformers."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from scripted_core import facts
from slipstream import LLM, SamplingParams
from slipstream.base.errors import InvalidParams, PromptTooLong
from slipstream.front import beam_search
from slipstream.front.beam_search import BeamSearch, BeamSearchParams
from slipstream.front.results import Logprob
from tiny import write_tiny

VOCAB, END = 4, 3
MODEL = facts(Path(), vocab_size=VOCAB, eos_token_ids=(END,))


def table(seed):
    """Logprobs of the next token after any sequence."""

    def of(tokens):
        draw = random.Random(f"{seed}{tokens}")
        weights = [draw.random() + 0.01 for _ in range(VOCAB)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return of


def search(logprobs, **given):
    params = BeamSearchParams(**given)
    beams = BeamSearch([0, 1], params, MODEL)
    width = params.of_step(MODEL).logprobs
    while beams.beams:
        entries = []
        for beam in beams.beams:
            ranked = sorted(enumerate(logprobs(tuple(beam.tokens))), key=lambda pair: -pair[1])[:width]
            entries.append({token: Logprob(value) for token, value in ranked})
        beams.take(entries)
    return beams.result()


@pytest.mark.parametrize("penalty", [0.0, 1.0, -2.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_wide_search_finds_the_best_of_all_sequences(seed, penalty):
    logprobs, size = table(seed), 3
    scored = []
    for tokens in itertools.product(range(VOCAB), repeat=size):
        cut = tokens.index(END) + 1 if END in tokens else size
        tokens = tokens[:cut]
        total = sum(logprobs((0, 1, *tokens[:place]))[token] for place, token in enumerate(tokens))
        scored.append((total / cut**penalty, tokens))
    best = sorted(set(scored), reverse=True)[:6]
    found = search(logprobs, beam_width=27, max_tokens=size, length_penalty=penalty)[:6]
    shown = [tuple(token for token in tokens if token != END) for _, tokens in best]
    assert [tuple(one.tokens[2:]) for one in found] == shown
    assert [one.finish_reason for one in found] == ["stop" if END in tokens else "length" for _, tokens in best]
    assert [one.cum_logprob / one.num_generated**penalty for one in found] == pytest.approx([each for each, _ in best])


def test_end_tokens_can_be_shown_or_ignored():
    def surely_ends(tokens):
        return [-5.0, -6.0, -7.0, -0.1]

    (best,) = search(surely_ends, beam_width=1, max_tokens=2, include_stop_str_in_output=True)
    assert best.tokens == [0, 1, END] and best.finish_reason == "stop"
    (best,) = search(surely_ends, beam_width=1, max_tokens=2, ignore_eos=True)
    assert best.tokens == [0, 1, END, END] and best.finish_reason == "length"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 1000}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"length_penalty": "x"}, "length_penalty"),
        ({"length_penalty": math.nan}, "length_penalty"),
    ],
)
def test_wrong_parameters_are_named(given, param):
    with pytest.raises(InvalidParams) as caught:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 2} | given))
    assert caught.value.param == param


def test_a_search_by_logits_is_refused():
    model = facts(Path(), vocab_size=VOCAB, logprobs_mode="raw_logits")
    with pytest.raises(InvalidParams, match="raw_logits"):
        BeamSearchParams(beam_width=1, max_tokens=5).of_step(model)


def test_a_search_that_leaves_the_context_is_refused():
    with pytest.raises(PromptTooLong, match="lower max_tokens"):
        BeamSearch([0] * 60, BeamSearchParams(beam_width=1, max_tokens=5), MODEL)


def test_a_step_copies_the_tokens_of_its_beams_only():
    """Not those of all candidates, of which each beam has twice the width."""
    width, size = 32, 2000
    model = facts(Path(), vocab_size=64, max_model_len=size + 9)
    beams = BeamSearch([0] * size, BeamSearchParams(beam_width=width, max_tokens=3), model)
    entries = {token: Logprob(-float(token)) for token in range(2 * width)}
    beams.take([entries])
    tracemalloc.start()
    try:
        beams.take([entries] * width)
        assert tracemalloc.get_traced_memory()[1] < 2 * width * size * 8
    finally:
        tracemalloc.stop()
    assert [beam.tokens[size:] for beam in beams.beams][:3] == [[0, 0], [0, 1], [1, 0]]


def test_transformers_finds_the_same(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = str(write_tiny(tmp_path, "llama"))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    prompt = [5, 77, 130, 9]
    wanted = oracle.generate(
        torch.tensor([prompt]), num_beams=3, num_return_sequences=3, max_new_tokens=6, do_sample=False,
        early_stopping="never", length_penalty=1.0, eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    with LLM(folder, use_tqdm_on_load=False, dtype="float64", num_threads=1, max_model_len=64) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
        (found, other) = llm.beam_search([{"prompt_token_ids": prompt}, "a text"], params)
        assert [sequence.tokens for sequence in found.sequences] == wanted.tolist()
        assert len(other.sequences) == 3 and all(each.text.startswith("a text") for each in other.sequences)
        (greedy,) = llm.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
        reference = oracle.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=-1)
        assert greedy.sequences[0].tokens == reference[0].tolist()


def test_structured_output(tmp_path, monkeypatch):
    """Against a search over all choices, by the logprobs of their tokens."""
    folder = str(write_tiny(tmp_path, "llama"))
    with LLM(folder, use_tqdm_on_load=False, dtype="float64", num_threads=1, max_model_len=64) as llm:
        tokenizer, end = llm.get_tokenizer(), llm.get_tokenizer().eos_token_id
        choices, prompt = ["ab", "ba", "abba"], [5, 77, 130]
        params = BeamSearchParams(beam_width=4, max_tokens=6, structured_outputs={"choice": choices})
        (found,) = llm.beam_search([prompt], params)
        texts = {tokenizer.decode(sequence.tokens[3:]): sequence for sequence in found.sequences}
        assert set(texts) == set(choices) and {one.finish_reason for one in found.sequences} == {"stop"}
        best = found.sequences[0]
        scored = [*best.tokens, end]
        (output,) = llm.generate([scored], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        total = sum(entry[token].logprob for entry, token in zip(output.prompt_logprobs[3:], scored[3:], strict=True))
        assert best.cum_logprob == pytest.approx(total)
        for num_reported in (0, 1024):  # many allowed tokens, or few: "[" and "]" are not the likeliest
            monkeypatch.setattr(beam_search, "MAX_REPORTED", num_reported)
            params = BeamSearchParams(beam_width=1, max_tokens=6, structured_outputs={"choice": ["[]"]})
            ((only,),) = [one.sequences for one in llm.beam_search([prompt], params)]
            assert tokenizer.decode(only.tokens[3:]) == "[]" and only.finish_reason == "stop"
        with pytest.raises(InvalidParams, match="end token"):
            llm.beam_search([prompt], msgspec.structs.replace(params, ignore_eos=True))
