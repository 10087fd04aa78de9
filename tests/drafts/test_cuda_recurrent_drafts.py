"""Drafts with recurrent states on a GPU, captured: the tokens are those of the CPU without drafts."""

from __future__ import annotations

import pytest
import torch

from replay_device import captured_forwards
from sampling.test_structured_output import close_pool, make_masks_late
from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.device.sync_check import watch
from slipstream.runner.drafter import DraftBatch
from slipstream.scheduler.grammar import mask_pool
from tiny import write_tiny

pytestmark = pytest.mark.cuda

PROMPTS = [[3, *range(20, 40), 7, *range(20, 30)], [5, 6] * 20, [*range(60, 130), *range(60, 80)], [9]]
OPTIONS = dict(use_tqdm_on_load=False, max_model_len=256, page_size=16, num_pages=96, max_num_seqs=4, dtype="float32")
ASKED = [
    SamplingParams(temperature=0, max_tokens=80, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, top_p=0.95, max_tokens=30, ignore_eos=True),
]


def tokens(results):
    return [sample.token_ids for result in results for sample in result.outputs]


class KnownAnswers:
    """Drafts the answers, with a wrong token at every fifth position. Reads device tables only, so it can be captured;
    a row's text is found by its first token."""

    always_runs = reads_hidden = fills_returned = False

    def __init__(self, llm: LLM, texts: list[list[int]]) -> None:
        runner = llm.core.executor
        self.rows, self.history = runner.heads[0].rows, runner.store.history
        longest = max(map(len, texts)) + 4
        padded = [text + [0] * (longest - len(text)) for text in texts]
        self.vocab_size = llm.config.model.info.vocab_size
        self.texts = torch.tensor(padded, device=self.rows.computed.device)
        runner.heads[0].drafter = self

    def propose(self, batch: DraftBatch, num_drafts: int) -> None:
        rows, offsets = batch.rows, torch.arange(num_drafts, device=batch.rows.device)
        first = self.history.tokens[self.history.table[rows, 0].long(), 0].long()
        text = (self.texts[:, 0] == first[:, None]).to(torch.int64).argmax(1)
        at = (self.rows.computed[rows][:, None] + 1 + offsets).clamp_(max=self.texts.shape[1] - 1)
        drafts = (self.texts[text[:, None], at] + (at % 5 == 0)) % self.vocab_size
        # a drafted row occurs several times, with the same drafts
        self.rows.next_tokens[:, 1 : 1 + num_drafts].index_copy_(0, rows, drafts)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(("family", "facts"), [("qwen3_next", {"head_dim": 64}), ("mamba2", {})])
def test_tokens_with_drafts_are_those_without(tmp_path, family, facts, depth):
    model = str(write_tiny(tmp_path, family, **facts))
    with LLM(model, **OPTIONS, device="cpu", num_threads=1) as llm:
        wanted = [tokens(llm.generate(PROMPTS, params)) for params in ASKED]
    with LLM(model, **OPTIONS, device="cuda", depth=depth, drafts="ngram:3") as llm:
        planner, graphs = llm.core.scheduler.drafts, llm.core.executor.graphs
        planner.length = None  # all plans have drafts, whatever they cost
        KnownAnswers(llm, [prompt + answer for prompt, answer in zip(PROMPTS, wanted[0], strict=True)])
        for _ in range(2):  # the second time from checkpoints
            for params, results in zip(ASKED, wanted, strict=True):
                assert tokens(llm.generate(PROMPTS, params)) == results
        counts = planner.counts
        assert 0 < counts.num_accepted < counts.num_drafts
        assert any(key[1].has_drafts for key in captured_forwards(graphs))
        assert not graphs.gave_up
        with watch() as log:
            llm.generate(PROMPTS, ASKED[0])
        assert not log.found, "\n".join(f"{sync.what} x{sync.count}\n{sync.stack}" for sync in log.found)


@pytest.mark.skipif(mask_pool.load() is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("family", "facts", "depth"), [("qwen3_next", {"head_dim": 64}, 2), ("mamba2", {}, 1), ("mamba", {}, 2)]
)
def test_rows_sit_out_steps_whose_masks_are_late(tmp_path, monkeypatch, family, facts, depth):
    model = str(write_tiny(tmp_path, family, **facts))
    shape = StructuredOutputsParams(regex="[a-p]{30}")
    asked = [ASKED[1].with_changes(structured_outputs=shape) for _ in PROMPTS[:3]] + [ASKED[0]]
    with LLM(model, **OPTIONS, device="cpu", num_threads=1) as llm:
        wanted = tokens(llm.generate(PROMPTS, asked))
    with LLM(model, **OPTIONS, device="cuda", depth=depth, drafts="ngram:3") as llm:
        planner, graphs = llm.core.scheduler.drafts, llm.core.executor.graphs
        planner.length = None  # all plans have drafts, whatever they cost
        KnownAnswers(llm, [prompt + answer for prompt, answer in zip(PROMPTS, wanted, strict=True)])
        sat = make_masks_late(llm.core, monkeypatch)
        for _ in range(2):  # the second time from checkpoints
            assert tokens(llm.generate(PROMPTS, asked)) == wanted
        counts = planner.counts
        assert len(sat) > 5 and 0 < counts.num_accepted < counts.num_drafts and not graphs.gave_up
        close_pool(llm.core)
