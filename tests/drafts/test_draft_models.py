"""Drafts by a second model: proved apart from verification, which would hide a broken drafter."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from msgspec import structs

from draft_spy import DraftSpy, argmax_after
from law7 import PAIRED, PROMPTS
from law7_engine import GREEDY, MAX_LEN, assert_same, make
from plain_decoder import plain_logits
from replay_device import ReplayDevice
from slipstream import LLM, SamplingParams
from slipstream.base.errors import BadCheckpoint, InvalidOption, ModelNotFound
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build
from slipstream.runner.model_drafter import ModelDrafter
from tiny import tiny_weights, write_tiny, write_weights

ONE_LAYER = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 24}
SAMPLED = [
    SamplingParams(temperature=0.4, seed=seed, max_tokens=20, ignore_eos=True, n=1 + (seed == 2)) for seed in range(6)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models whose caches have one group, and a draft model of other heads with a group of its own."""
    root = tmp_path_factory.mktemp("drafts")
    shapes = {"target": ("llama", {}), "window": ("mistral", {}), "other": ("llama", ONE_LAYER)}
    return {name: str(write_tiny(root / name, family, **facts)) for name, (family, facts) in shapes.items()}


def spec(model, num=3):
    return {"method": "draft_model", "model": model, "num_speculative_tokens": num}


def open_llm(model, draft, **options):
    llm = make(model, speculative_config=spec(draft), **options)
    llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
    return llm


@pytest.fixture(scope="module")
def wanted(folders):
    with make(folders["target"]) as llm:
        return [llm.generate(PROMPTS, params) for params in (GREEDY, SAMPLED)]


@pytest.mark.parametrize(("cell", "draft"), [(0, "window"), (1, "other"), (2, "window"), (5, "other")])
def test_tokens_do_not_depend_on_the_draft_model(folders, wanted, cell, draft):
    with open_llm(folders["target"], folders[draft], **PAIRED[cell]) as llm:
        for params, results in zip((GREEDY, SAMPLED), wanted, strict=True):
            assert_same(llm.generate(PROMPTS, params), results)
        counts = llm.core.scheduler.drafts.counts
        assert counts.num_drafts > 0 and (draft == "other" or 0 < counts.num_accepted < counts.num_drafts)
        llm.core.scheduler.cache.check()


@pytest.mark.parametrize(("cell", "name"), [(0, "target"), (0, "window"), (1, "target"), (2, "window")])
def test_every_draft_of_the_same_model_is_accepted(folders, cell, name):
    with open_llm(folders[name], folders[name], **PAIRED[cell]) as llm:
        for _ in range(2):  # the second time prefixes are cached
            llm.generate(PROMPTS, GREEDY)
        counts = llm.core.scheduler.drafts.counts
        assert counts.num_accepted == counts.num_drafts > 50


@pytest.mark.parametrize("options", [dict(chunked=True, cached=True, preempted=True), dict(depth=2)])
def test_proposals_are_those_of_the_whole_text(folders, options):
    """Also after chunks, prefix hits, preemption, copied pages and partly accepted drafts."""
    with open_llm(folders["target"], folders["other"], **options) as llm:
        spy = DraftSpy(llm)
        for params in (SAMPLED, GREEDY):
            llm.generate(PROMPTS, params)
        model, seen = llm.core.executor.find(ModelDrafter).model, {}
        for tokens, drafts in spy.proposals:
            if len(tokens) + len(drafts) <= MAX_LEN:  # further positions exist in no row
                seen[*tokens, *drafts] = drafts
        assert len(seen) > 100
        for tokens, drafts in [*seen.items()][::4]:
            assert argmax_after(plain_logits(model, list(tokens[:-1])), len(drafts)) == drafts


def test_partly_accepted_drafts_leave_no_gap(folders):
    """Sampled rows reject about half of the drafts of their own model; all proposals are those of the whole text."""
    with open_llm(folders["target"], folders["target"], chunked=True, cached=True, preempted=True, depth=1) as llm:
        spy = DraftSpy(llm)
        llm.generate(PROMPTS, SAMPLED)
        counts = llm.core.scheduler.drafts.counts
        assert 0 < counts.num_accepted < counts.num_drafts
        model = llm.core.executor.find(ModelDrafter).model
        for tokens, drafts in spy.proposals[::4]:
            if len(tokens) + len(drafts) <= MAX_LEN:
                assert argmax_after(plain_logits(model, [*tokens, *drafts[:-1]]), len(drafts)) == drafts


def test_captured_heads_draft_the_same(folders, wanted):
    device = ReplayDevice(2)
    with open_llm(folders["target"], folders["target"], chunked=True, cached=True, depth=2, device=device) as llm:
        graphs = llm.core.executor.graphs
        graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        for _ in range(2):
            assert_same(llm.generate(PROMPTS, GREEDY), wanted[0])
        counts = llm.core.scheduler.drafts.counts
        assert counts.num_accepted == counts.num_drafts > 50
        captured = [key for key, entry in graphs._captured.items() if entry is not None]
        assert any(key[0] == "head" and key.drafts[:2] == (True, 3) for key in captured)


class Alternating:
    """Replaces `DraftLength`: of `period` plans, some neither have nor propose drafts."""

    def __init__(self, period, num_without, *, is_resting=False):
        self.period, self.num_without, self.probed, self.is_resting = period, num_without, (), is_resting
        self.number = 0

    def skip(self):
        return False

    def choose(self, counts, count_matched):
        self.number += 1
        phase = self.number % self.period
        return (3,) * 3 if phase > self.num_without else (0,) * 3, 3 if phase >= self.num_without else 0

    def add(self, seen):
        pass

    def cost(self, num_rows, num_drafts):
        return 0.0


@pytest.mark.parametrize(
    ("name", "period", "options"),
    [
        ("target", (7, 3), dict(depth=1)),
        ("target", (9, 5), dict(chunked=True, cached=True, preempted=True, depth=2)),
        ("window", (7, 3), dict(depth=1)),  # it follows every step
    ],
)
def test_a_draft_model_catches_up_after_steps_without_drafts(folders, name, period, options):
    """Also with chunks, prefix hits, preemption and copied pages whose entries are missing."""
    params = [structs.replace(GREEDY, n=1 + (index == 2)) for index in range(len(PROMPTS))]
    with open_llm(folders[name], folders[name], **options) as llm:
        drafts = llm.core.scheduler.drafts
        assert (drafts.lag is None) == (name == "window")
        drafts.length = Alternating(*period)
        for _ in range(3):
            llm.generate(PROMPTS, params)
        assert drafts.counts.num_accepted == drafts.counts.num_drafts > 50
        llm.core.scheduler.cache.check()


def test_a_draft_model_computes_at_most_one_step_of_tokens_to_catch_up(folders):
    """What is left waits for the next steps, and the request has no drafts meanwhile."""
    with open_llm(folders["target"], folders["target"]) as llm:
        drafts, spy = llm.core.scheduler.drafts, DraftSpy(llm)
        drafts.length = Alternating(12, 3)
        drafts.lag.max_tokens = 5
        llm.generate(PROMPTS, GREEDY)
        assert drafts.counts.num_accepted == drafts.counts.num_drafts > 10
        assert any(len(tokens) > 12 for tokens, _ in spy.proposals)


def test_a_draft_model_does_not_run_while_there_are_no_drafts(folders, monkeypatch):
    with open_llm(folders["target"], folders["target"]) as llm:
        drafts, model, seen = llm.core.scheduler.drafts, llm.core.executor.find(ModelDrafter).model, []
        forward = type(model).forward
        monkeypatch.setattr(
            type(model),
            "forward",
            lambda self, context: (
                seen.append(len(context.batch.ids)) if self is model else None,
                forward(self, context),
            )[1],
        )
        drafts.length = Alternating(1000, 999)
        llm.generate(PROMPTS, GREEDY)
        assert not seen and not drafts.counts.num_drafts
        drafts.length = Alternating(6, 2)
        llm.generate(PROMPTS, GREEDY)
        assert seen and drafts.counts.num_drafts > 10


def test_memory_is_planned_to_the_byte(folders):
    options = dict(model=folders["target"], speculative_config=spec(folders["other"]), page_size=4, num_pages=40)
    options |= dict(max_num_seqs=5, max_model_len=64, num_threads=1)
    config, memory = estimate_build(make_options(**options))
    with LLM(**options, use_tqdm_on_load=False) as llm:
        runner = llm.core.executor
        models = [runner.model, runner.find(ModelDrafter).model]
        tensors = chain(*((*model.parameters(), *model.buffers()) for model in models))
        assert sum(tensor.nbytes for tensor in tensors) == memory.weights
        stored = sum(cache.nbytes for pair in runner.store.caches for cache in pair)
        scratch = config.draft.page_bytes * runner.store.scratch.num_pages
        assert stored == memory.cache + scratch and scratch > 0
        tables = runner.input_batch.page_tables.tables.nbytes + runner.store.history.tokens.nbytes
        assert scratch + tables <= memory.tables


def test_draft_models_that_do_not_fit_are_refused(folders, tmp_path):
    def refuse(error, says, **options):
        with pytest.raises(error, match=says):
            estimate_build(make_options(model=folders["target"], **options))

    more = write_tiny(tmp_path / "more", "llama", vocab_size=320)
    refuse(InvalidOption, "320 tokens in its vocabulary and the model 304", speculative_config=spec(str(more)))
    hybrid = write_tiny(tmp_path / "hybrid", "qwen3_5")
    refuse(InvalidOption, "cannot be taken back", speculative_config=spec(str(hybrid)))
    refuse(ModelNotFound, "draft model of speculative_config: there is no", speculative_config=spec("./nothing"))
    short = write_tiny(tmp_path / "short", "llama", max_position_embeddings=64)
    config, _ = estimate_build(make_options(model=folders["target"], speculative_config=spec(str(short))))
    assert config.scheduler.max_model_len == 64
    refuse(InvalidOption, "was made for 64", speculative_config=spec(str(short)), max_model_len=65)
    (short / "model.safetensors").unlink()
    refuse(BadCheckpoint, "draft model of speculative_config: .*no weights", speculative_config=spec(str(short)))


def test_a_draft_model_without_a_tensor_is_refused(folders, tmp_path):
    folder = write_tiny(tmp_path, "llama")
    weights = tiny_weights(folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    write_weights(folder, weights)
    with pytest.raises(BadCheckpoint, match=r"draft model.*1 missing \(layers.1.mlp.gate_up.up.weight"):
        make(folders["target"], speculative_config=json.dumps(spec(str(folder))))
