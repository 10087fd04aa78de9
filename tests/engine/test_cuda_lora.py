"""LoRA adapters on a GPU: copies run on a stream of their own, beside steps in flight, and change no token."""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.runner.lora_store import AdapterStore
from tiny import write_tiny
from tiny_adapter import write_adapter

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
PROMPTS = [[1 + i, 2, 3, 4 + i] for i in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_adapters_that_take_turns_in_one_slot_give_the_tokens_of_the_cpu(tmp_path):
    model = write_tiny(tmp_path / "model", "llama")
    loras = [
        LoRARequest(f"a{i}", i + 1, str(write_adapter(tmp_path / f"a{i}", model, rank=8, seed=i))) for i in range(3)
    ]
    given = [[None, *loras][i % 4] for i in range(len(PROMPTS))]

    def run(device: str) -> list[list[int]]:
        options = dict(enable_lora=True, max_loras=1, max_cpu_loras=2, max_lora_rank=8, max_num_seqs=4)
        with LLM(
            str(model),
            device=device,
            dtype="float32",
            max_model_len=64,
            num_pages=64,
            use_tqdm_on_load=False,
            **options,
        ) as llm:
            store = llm.core.executor.find(AdapterStore)
            assert (store._stream is llm.core.executor.device.compute) == (device == "cpu")
            found = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=given)
            found += llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=given[::-1])
        return [list(each.outputs[0].token_ids) for each in found]

    assert run("cuda") == run("cpu")
