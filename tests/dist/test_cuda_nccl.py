"""Tensor parallel layers over NCCL at world size 1: collectives in captured graphs, and the tokens of plain layers."""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.dist.group import Group
from slipstream.nn.layers.ranked import connect_ranks
from slipstream.nn.models import load
from slipstream.nn.models.registry import find_shape
from slipstream.nn.models.sharding import shard_shape
from slipstream.nn.shapes import Shard
from slipstream.runner import assemble
from tiny import write_tiny

pytestmark = pytest.mark.cuda

OPTIONS = dict(
    use_tqdm_on_load=False, max_model_len=128, page_size=16, num_pages=64, max_num_seqs=4, dtype="float32", device="cuda"
)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [[i + 3, *range(20, 30 + 7 * i), i + 5] for i in range(4)]


class CountedGroup(Group):
    num_calls = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().all_reduce(x)


def tokens(results):
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_captured_collectives_give_the_tokens_of_plain_layers(tmp_path, monkeypatch, family):
    folder = str(write_tiny(tmp_path, family, head_dim=64))
    with LLM(folder, **OPTIONS) as llm:
        wanted = tokens(llm.generate(PROMPTS, GREEDY))
    group = CountedGroup(0, 1, tmp_path / "store", device=torch.device("cuda", 0))
    opened = assemble.open_model

    def open_sharded(*args):
        model, fill = opened(*args)
        connect_ranks(model, group)
        return model, fill

    monkeypatch.setattr(load, "find_local_shape", lambda info, *args, **kw: shard_shape(find_shape(info), Shard(0, 1)))
    monkeypatch.setattr(assemble, "open_model", open_sharded)
    monkeypatch.setattr(assemble, "can_compile_ahead", lambda: False)  # a forked process has no NCCL
    with LLM(folder, **OPTIONS) as llm:
        assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted
        before = group.num_calls
        assert before > 10
        assert tokens(llm.generate(PROMPTS[:1], GREEDY)) == wanted[:1]
        # steps of one token replay graphs, in which the collectives are
        assert group.num_calls - before < GREEDY.max_tokens
