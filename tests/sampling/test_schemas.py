"""The schemas of the public suite on a model with random weights: what ends is valid, and what a stop string cuts off
begins like a valid text, with penalties and biases, at depth 0, 1 and 2."""

from __future__ import annotations

import pytest

from schema_suite import breaks_schema, compiled_schemas, shape_of
from slipstream import LLM, SamplingParams
from tiny import write_tiny

STOP = ["11", "ee"]
LIKED = {ord(letter): 6.0 for letter in '"]}0,e:a-1[{nt'}  # texts that end soon
PENALTIES = dict(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def make(model, depth):
    return LLM(model, depth=depth, use_tqdm_on_load=False, max_model_len=96, max_num_seqs=32, num_threads=1)


@pytest.fixture(scope="module")
def compiled(model):
    with make(model, 0) as llm:
        return compiled_schemas(llm.core.constraints.grammars)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_penalties_and_stop_strings_leave_outputs_valid(model, compiled, depth):
    # each schema at one depth; scheduler/grammar/test_schema_suite.py has all of them at each
    numbered = [*enumerate(compiled)][depth::3]
    with make(model, depth) as llm:
        grammars = llm.core.constraints.grammars
        asked = [
            SamplingParams(
                seed=index, max_tokens=48, stop=STOP, logit_bias=LIKED, structured_outputs=shape_of(entry), **PENALTIES
            )
            for index, entry in numbered
        ]
        prompts = [[1 + index % 200, index // 200] for index, _ in numbered]
        outputs = [result.outputs[0] for result in llm.generate(prompts, asked, use_tqdm=False)]
        num_ended = num_cut = 0
        for (_, entry), output in zip(numbered, outputs, strict=True):
            matcher = grammars.compile(shape_of(entry)).result().first.deep_copy()
            drawn = [token for token in output.token_ids if token < 256]  # bytes, without the end token
            assert all(map(matcher.consume_token, drawn)), (entry["schema"], output)
            assert not any(word in output.text for word in STOP)
            if output.stop_reason in STOP:
                num_cut += 1
            elif output.finish_reason == "stop":
                num_ended += 1
                assert not breaks_schema(entry, output.text), (entry["schema"], output.text)
            else:
                assert output.finish_reason == "length", output
    assert num_ended > 80 and num_cut > 10, (num_ended, num_cut)
