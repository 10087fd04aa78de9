"""Drafts of a block in one pass (DFlash): proposals are those of a plain float64 reference.

Weights are random, but a few tokens have large logits: some drafts are right, and rows accept parts of their drafts.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from causal_oracle import exact_math, norm_in_float64
from draft_spy import DraftSpy
from law7 import PAIRED, PROMPTS
from law7_engine import GREEDY, assert_same, make
from replay_device import ReplayDevice
from slipstream import LLM, SamplingParams
from slipstream.base.errors import BadCheckpoint, InvalidOption, ModelNotFound
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build
from slipstream.runner.model_drafter import BlockDrafter
from tiny import write_weights
from tiny_drafters import HEAD_DIM, write_dflash, write_few

SAMPLED = [
    SamplingParams(temperature=0.8, seed=seed, max_tokens=20, ignore_eos=True, n=1 + (seed == 2)) for seed in range(6)
]
MASK = 300
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class PlainDFlash:
    """The drafter over a whole text, without a cache; the target's hidden states are those of transformers."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.whole = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
        norm_in_float64(self.whole)
        self.config = json.loads((folder / "config.json").read_text())
        self.own = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.target_layers = self.config["dflash_config"]["target_layer_ids"]

    def propose(self, tokens: list[int], num_drafts: int) -> list[int]:
        """Drafts after the last token, which the target has not computed yet."""
        with exact_math(torch.float64):
            states = self.whole.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            found = torch.cat([states[layer + 1][0] for layer in self.target_layers], -1)
            features = rms_norm(found @ self.own["fc.weight"].T, self.own["hidden_norm.weight"])
            block = [tokens[-1], *[MASK] * num_drafts]
            x = self.whole.model.embed_tokens.weight[block]
            for layer in range(2):
                x = self.layer(layer, x, features)
            hidden = rms_norm(x[1:], self.own["norm.weight"])
            return (hidden @ self.whole.lm_head.weight.T).argmax(1).tolist()

    def layer(self, number: int, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        own = {name.removeprefix(f"layers.{number}."): tensor for name, tensor in self.own.items()}
        normed, num, dim = rms_norm(x, own["input_layernorm.weight"]), len(features), HEAD_DIM
        keys_of = torch.cat([features, normed])
        query = (normed @ own["self_attn.q_proj.weight"].T).view(len(x), 4, dim)
        key, value = (keys_of @ own[f"self_attn.{part}_proj.weight"].T for part in "kv")
        positions = torch.arange(len(keys_of))
        query = turned(rms_norm(query, own["self_attn.q_norm.weight"]), positions[num:])
        key = turned(rms_norm(key.view(-1, 1, dim), own["self_attn.k_norm.weight"]), positions)[:, 0]
        scores = torch.einsum("qhd,kd->hqk", query, key) / dim**0.5
        if self.config.get("layer_types", [""] * 2)[number] == "sliding_attention":
            distance = positions[num:, None] - positions
            window = self.config["sliding_window"]
            scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        mixed = torch.einsum("hqk,kd->qhd", scores.softmax(-1), value).reshape(len(x), -1)
        x = x + mixed @ own["self_attn.o_proj.weight"].T
        inner = rms_norm(x, own["post_attention_layernorm.weight"])
        gate, up = (inner @ own[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return x + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T


def turned(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    frequencies = 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    angles = torch.outer(positions.double(), frequencies)[:, None]
    first, second = heads.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def spec(folder: Path, num_drafts: int = 4) -> dict[str, object]:
    return {"method": "dflash", "model": str(folder), "num_speculative_tokens": num_drafts}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_few(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def drafter(model, tmp_path_factory):
    return write_dflash(tmp_path_factory.mktemp("drafter"), model)


@pytest.fixture(scope="module")
def wanted(model):
    with make(str(model)) as llm:
        return [llm.generate(PROMPTS, params) for params in (SAMPLED, GREEDY)]


def check(spy: DraftSpy, reference: PlainDFlash, at_least: int = 50) -> None:
    spy.check(reference, at_least=at_least, stride=7)


@pytest.mark.parametrize("cell", [0, 2])
def test_proposals_are_those_of_the_whole_text(model, drafter, wanted, cell):
    """After chunks, prefix hits, preemption and partly accepted drafts; and tokens are those without drafts (law 7)."""
    with make(str(model), speculative_config=spec(drafter), **PAIRED[cell]) as llm:
        llm.core.scheduler.drafts.length = None
        spy = DraftSpy(llm)
        for params, results in zip((SAMPLED, GREEDY), wanted, strict=True):
            assert_same(llm.generate(PROMPTS, params), results)
        counts = llm.core.scheduler.drafts.counts
        assert 0 < counts.num_accepted < counts.num_drafts
        assert not PAIRED[cell]["cached"] or llm.core.scheduler.cache.num_hits > 0
        llm.core.scheduler.cache.check()
    check(spy, PlainDFlash(drafter, model))


def test_layers_with_a_window_are_causal(model, tmp_path):
    drafter = write_dflash(tmp_path, model, **WINDOWED)
    with make(str(model), speculative_config=spec(drafter, 5), chunked=True, cached=True, depth=1) as llm:
        llm.core.scheduler.drafts.length = None
        spy = DraftSpy(llm)
        llm.generate(PROMPTS, GREEDY)
    check(spy, PlainDFlash(drafter, model), 30)


def test_steps_without_drafts_keep_the_context_complete(model, drafter):
    """The number of drafts adapts: after steps that proposed nothing, the next proposals are right."""
    with make(str(model), speculative_config=spec(drafter), cached=True) as llm:
        number = 0

        class Alternating:
            probed = ()

            def skip(self):
                return False

            def choose(self, counts, count_matched):
                nonlocal number
                number += 1
                return (3,) * 3 if number % 7 > 3 else (0,) * 3, 3 if number % 7 >= 3 else 0

            def add(self, seen):
                pass

            def cost(self, num_rows, num_drafts):
                return 0.0

        llm.core.scheduler.drafts.length = Alternating()
        spy = DraftSpy(llm)
        llm.generate(PROMPTS, GREEDY)
    check(spy, PlainDFlash(drafter, model), 10)


def test_captured_heads_draft_the_same(model, drafter, wanted):
    device = ReplayDevice(2)
    with make(str(model), speculative_config=spec(drafter), chunked=True, cached=True, depth=2, device=device) as llm:
        llm.core.scheduler.drafts.length = None
        graphs = llm.core.executor.graphs
        graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        for params, results in zip((SAMPLED, GREEDY), wanted, strict=True):
            assert_same(llm.generate(PROMPTS, params), results)
        counts = llm.core.scheduler.drafts.counts
        assert 0 < counts.num_accepted < counts.num_drafts
        captured = [key for key, entry in graphs._captured.items() if entry is not None]
        assert any(key[0] == "head" and key.drafts[:2] == (True, 4) for key in captured)


def test_memory_is_planned_to_the_byte(model, drafter):
    options = dict(model=str(model), speculative_config=spec(drafter), page_size=4, num_pages=40, num_threads=1)
    options |= dict(max_num_seqs=5, max_model_len=64)
    config, memory = estimate_build(make_options(**options))
    with LLM(**options, use_tqdm_on_load=False) as llm:
        runner = llm.core.executor
        models = [runner.model, runner.find(BlockDrafter).model]
        tensors = chain(*((*each.parameters(), *each.buffers()) for each in models))
        assert sum(tensor.nbytes for tensor in tensors) == memory.weights
        stored = sum(cache.nbytes for pair in runner.store.caches for cache in pair)
        scratch = config.draft.page_bytes * runner.store.scratch.num_pages
        assert stored == memory.cache + scratch and runner.store.scratch.pages_per_row == 2  # 5 positions of a block


def test_drafters_that_do_not_fit_are_refused(model, tmp_path):
    folder = write_dflash(tmp_path / "drafter", model)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")

    def refuse(error, says, method="dflash", tensors=weights, num_drafts=4, **changed):
        (folder / "config.json").write_text(json.dumps(config | changed))
        write_weights(folder, tensors)
        with pytest.raises(error, match=says):
            make(str(model), speculative_config=spec(folder, num_drafts) | {"method": method})

    def own(**changed):
        return {"dflash_config": config["dflash_config"] | changed}

    refuse(InvalidOption, "for a hidden size of 32, and the model has 64", hidden_size=32)
    refuse(InvalidOption, "for a vocabulary of 99, and the model has 304", vocab_size=99)
    refuse(InvalidOption, "its method is dflash, not draft_model", "draft_model")
    refuse(InvalidOption, "its method is draft_model, or eagle", architectures=["Qwen3ForCausalLM"])
    refuse(InvalidOption, r"target_layer_ids of the DFlash drafter is \[0, 2\]", **own(target_layer_ids=[0, 2]))
    refuse(InvalidOption, "mask_token_id of the DFlash drafter is 304", **own(mask_token_id=304))
    refuse(InvalidOption, "blocks of the DFlash drafter have 8 tokens.*at most 7", num_drafts=8)
    refuse(InvalidOption, "has conv_kernel_size", **own(conv_kernel_size=3))
    refuse(InvalidOption, "window in both directions", **WINDOWED, is_causal=False)
    refuse(BadCheckpoint, "which no DFlash drafter has", tensors=weights | {"odd.weight": torch.zeros(2)})
    without = {name: tensor for name, tensor in weights.items() if name != "fc.weight"}
    refuse(BadCheckpoint, r"draft model.*1 missing \(fc.weight", tensors=without)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="draft model of speculative_config: .*no weights"):
        estimate_build(make_options(model=str(model), speculative_config=spec(folder)))
    with pytest.raises(ModelNotFound, match="draft model of speculative_config: there is no"):
        estimate_build(make_options(model=str(model), speculative_config=spec(tmp_path / "nothing")))
