"""Drafts from hidden states of the target (MTP, EAGLE-3): proposals are those of plain float64 references.

Weights are random, but a few tokens have large logits: some drafts are right, and rows accept parts of their drafts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_law7 import GREEDY, assert_same, make
from transformers import AutoConfig, AutoModelForCausalLM

from causal_oracle import exact_math, norm_in_float64
from draft_spy import DraftSpy
from law7 import PAIRED, PROMPTS
from replay_device import ReplayDevice
from slipstream import SamplingParams
from slipstream.config.options import make_options
from slipstream.engine.build import foresee
from slipstream.errors import BadCheckpoint, InvalidOption
from tiny import write_tiny, write_weights
from tiny_drafters import write_mtp

SAMPLED = [
    SamplingParams(temperature=0.8, seed=seed, max_tokens=20, ignore_eos=True, n=1 + (seed == 2)) for seed in range(6)
]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


class PlainMtp:
    """The layer is that of a model of transformers with one layer, which gets its inputs as embeddings."""

    def __init__(self, folder: Path) -> None:
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        config = AutoConfig.from_pretrained(folder)
        self.number = config.num_hidden_layers
        config.num_hidden_layers, config.first_k_dense_replace, config._experts_implementation = 1, 0, "eager"
        whole.config._experts_implementation = "eager"
        self.head = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        stored = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        root = f"model.layers.{self.number}."
        self.own = {name.removeprefix(root): tensor for name, tensor in stored.items() if name.startswith(root)}
        layer = self.head.model.layers[0]
        layer.load_state_dict({name: self.own[name] for name in layer.state_dict()})
        self.head.model.norm.weight.data = self.own["shared_head.norm.weight"]
        self.head.lm_head.weight.data = stored["lm_head.weight"]
        self.embedding, self.whole = stored["model.embed_tokens.weight"], whole
        norm_in_float64(whole)
        norm_in_float64(self.head)
        layer.register_forward_hook(self._keep)

    def _keep(self, layer, inputs, output) -> None:
        self.raw = output[0] if isinstance(output, tuple) else output

    def propose(self, tokens: list[int], num_drafts: int) -> list[int]:
        with exact_math(torch.float64):
            found = self.whole.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
            ids, drafts = tokens[1:], []
            for _ in range(num_drafts):
                embeds = rms_norm(self.embedding[ids], self.own["enorm.weight"])
                both = torch.cat([embeds, rms_norm(found, self.own["hnorm.weight"])], -1)
                logits = self.head(inputs_embeds=(both @ self.own["eh_proj.weight"].T)[None], use_cache=False).logits
                drafts.append(int(logits[0, -1].argmax()))
                ids = [*ids, drafts[-1]]
                found = torch.cat([found, self.raw.view(-1, found.shape[1])[-1:]])
        return drafts


class Method:
    """A target with a drafter, the tokens without drafts, and the reference."""

    def __init__(self, model: Path, spec: dict, reference) -> None:
        self.model, self.spec, self.reference = str(model), spec | {"num_speculative_tokens": 3}, reference
        with make(self.model) as llm:
            self.wanted = [llm.generate(PROMPTS, params) for params in (GREEDY, SAMPLED)]

    def open(self, **options):
        llm = make(self.model, speculative_config=self.spec, **options)
        llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
        return llm


@pytest.fixture(scope="module", params=["mtp"])
def method(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = write_mtp(folder)
    return Method(model, {"method": "mtp"}, PlainMtp(model))


@pytest.mark.parametrize("cell", [1, 5])
def test_tokens_do_not_depend_on_the_drafter(method, cell):
    with method.open(**PAIRED[cell]) as llm:
        for params, results in zip((GREEDY, SAMPLED), method.wanted, strict=True):
            assert_same(llm.generate(PROMPTS, params), results)
        counts = llm.core.scheduler.drafts.counts
        assert 0 < counts.num_accepted < counts.num_drafts
        llm.core.scheduler.cache.check()


@pytest.mark.parametrize("depth", [0, 2])
def test_proposals_are_those_of_the_reference(method, depth):
    """After chunks, prefix hits, preemption, copied pages and partly accepted drafts."""
    with method.open(chunked=True, cached=True, preempted=True, depth=depth) as llm:
        spy = DraftSpy(llm)
        for params in (SAMPLED, GREEDY):  # the second time prefixes are cached
            llm.generate(PROMPTS, params)
        assert llm.core.scheduler.cache.num_hits > 20
        counts = llm.core.scheduler.drafts.counts
        assert 0.05 < counts.num_accepted / counts.num_drafts < 0.95
    seen = {tuple(tokens): drafts for tokens, drafts in spy.proposals if len(tokens) + len(drafts) <= 96}
    assert len(seen) > 100
    for tokens, drafts in [*seen.items()][:: 8 + depth]:
        assert method.reference.propose(list(tokens), len(drafts)) == drafts, f"after {len(tokens)} tokens"


def test_captured_heads_give_the_same_tokens(method):
    device = ReplayDevice(1)
    with method.open(chunked=True, cached=True, depth=1, device=device) as llm:
        graphs = llm.core.executor.graphs
        graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        for _ in range(2):
            assert_same(llm.generate(PROMPTS, GREEDY), method.wanted[0])
        spy = DraftSpy(llm)
        llm.generate(PROMPTS, GREEDY)
        captured = [key for key, entry in graphs._captured.items() if entry is not None]
        assert any(key[0] == "head" and key[4:6] == (True, 3) for key in captured)
    assert len(spy.proposals) > 50
    for tokens, drafts in spy.proposals[::9]:
        assert len(tokens) > 93 or method.reference.propose(tokens, 3) == drafts


def test_memory_of_the_head_is_planned_to_the_byte(method):
    options = dict(model=method.model, speculative_config=method.spec, dtype="float64", num_pages=40, max_num_seqs=5)
    config, memory = foresee(make_options(**options, max_model_len=96))
    assert config.cache.drops_last_page and config.draft.reads_hidden
    with method.open() as llm:
        runner = llm.core.executor
        models = [runner.model, runner.drafter.model]
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        assert sum(tensor.nbytes for tensor in tensors) == memory.weights


def test_models_without_an_mtp_layer_are_refused(tmp_path):
    plain = write_tiny(tmp_path / "plain", "llama")
    with pytest.raises(InvalidOption, match="LlamaForCausalLM has no MTP layer"):
        foresee(make_options(model=str(plain), speculative_config={"method": "mtp"}))
    folder = write_mtp(tmp_path / "mtp")
    weights = load_file(folder / "model.safetensors")
    write_weights(folder, {name: tensor for name, tensor in weights.items() if "eh_proj" not in name})
    with pytest.raises(BadCheckpoint, match=r"draft model.*1 missing \(projection.weight"):
        make(str(folder), speculative_config={"method": "mtp"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidOption, match="num_nextn_predict_layers of config.json is 0"):
        foresee(make_options(model=str(folder), speculative_config={"method": "mtp"}))
