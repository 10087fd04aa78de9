"""benchmarks/low_bit_accuracy.py: the distributions that it compares are those of the public API."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from slipstream import SamplingParams
from tiny import write_tiny

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "low_bit_accuracy.py"
IDS = [7, 9, 11, 40, 41, 42, 43]


@pytest.fixture(scope="module")
def accuracy():
    spec = importlib.util.spec_from_file_location("low_bit_accuracy", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("step_tokens", [len(IDS) + 1, 3, 1])
def test_logprobs_are_those_of_the_prompt(accuracy, tmp_path, step_tokens, is_captured, monkeypatch):
    """Also where the head of the last token is a captured graph, whose logits are not recorded."""
    options = dict(model=str(write_tiny(tmp_path)), dtype="float32", max_model_len=64, skip_tokenizer_init=True)
    engine = accuracy.Engine(step_tokens, num_threads=1, **options)
    with engine.llm:
        generate = engine.llm.generate
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5, logprobs=5)
        (result,) = generate([IDS], params, use_tqdm=False)

        def generate_captured(*args, **named):
            results = generate(*args, **named)
            assert len(engine.seen.pop()) == 1
            return results

        if is_captured:
            monkeypatch.setattr(engine.llm, "generate", generate_captured)
        found = engine.logprobs(IDS)
        assert len(found) == len(IDS)
        for line, entries in zip(found, [*result.prompt_logprobs[1:], result.outputs[0].logprobs[0]], strict=True):
            assert len(entries) >= 5
            for token, entry in entries.items():
                assert abs(float(line[token]) - entry.logprob) < 1e-5
