"""A single row has graphs of its own while it is short: its tokens are the same before and after it is longer."""

from __future__ import annotations

import pytest

from replay_device import ReplayDevice, captured_forwards
from slipstream import LLM, SamplingParams
from tiny import write_tiny

PROMPT = list(range(5, 14))
SMALL = dict(use_tqdm_on_load=False, dtype="float64", max_model_len=64, page_size=4, max_num_seqs=4)


@pytest.mark.every_second("family", "whole")
@pytest.mark.parametrize("whole", [True, False], ids=["one graph", "two graphs"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5"])
def test_a_row_that_becomes_long_draws_the_same_tokens(tmp_path, family, whole, monkeypatch):
    folder = str(write_tiny(tmp_path, family))
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True)
    with LLM(folder, **SMALL) as llm:
        wanted = [llm.generate([PROMPT], params)[0].outputs[0].token_ids for _ in range(2)]
    for module in ("input_batch", "graphs"):
        monkeypatch.setattr(f"slipstream.runner.{module}.SHORT_LENGTH", 22)
    with LLM(folder, **SMALL, depth=1, _device=ReplayDevice(1)) as llm:
        runner = llm.core.executor
        runner.graphs.token_sizes, runner.whole_steps = [], whole
        found = [llm.generate([PROMPT], params)[0].outputs[0].token_ids for _ in range(2)]
        sizes = {key[1] for key in captured_forwards(runner.graphs)}
    assert found == wanted
    assert {size.is_short for size in sizes if size.rows == 1} == {True, False}
