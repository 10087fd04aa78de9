"""Drafts from hidden states of the target (MTP, EAGLE-3): proposals are those of plain float64 references.

Weights are random, but a few tokens have large logits: some drafts are right, and rows accept parts of their drafts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from causal_oracle import exact_math, norm_in_float64
from draft_spy import DraftSpy
from law7 import PAIRED, PROMPTS
from law7_engine import GREEDY, MAX_LEN, assert_same, make
from plain_mtp import PlainMtp, rms_norm
from replay_device import ReplayDevice
from slipstream import SamplingParams
from slipstream.base.errors import BadCheckpoint, InvalidOption
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build
from slipstream.runner.model_drafter import HeadDrafter
from tiny import write_tiny, write_weights
from tiny_drafters import HEAD_DIM, write_eagle, write_eagle3, write_few, write_mtp

SAMPLED = [
    SamplingParams(temperature=0.8, seed=seed, max_tokens=20, ignore_eos=True, n=1 + (seed == 2)) for seed in range(6)
]


class PlainEagle3:
    """All of the head in plain torch; the target's hidden states are those of transformers."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.whole = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
        norm_in_float64(self.whole)
        self.config = json.loads((folder / "config.json").read_text())
        self.own = {
            name.removeprefix("midlayer.").removeprefix("layers.0."): tensor.double()
            if tensor.is_floating_point()
            else tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }

    def layer(self, embeds: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        own = self.own
        normed = rms_norm(features, own["hidden_norm.weight"], 1e-5)
        both = torch.cat([rms_norm(embeds, own["input_layernorm.weight"], 1e-5), normed], -1)
        return self.after(both, normed if self.config.get("norm_before_residual") else features)

    def after(self, inputs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Attention over the inputs, then the MLP."""
        own, num, dim = self.own, len(inputs), HEAD_DIM

        def turned(heads: torch.Tensor) -> torch.Tensor:
            angles = torch.outer(torch.arange(num), 10_000.0 ** -(torch.arange(0, dim, 2) / dim)).double()[:, None]
            first, second = heads.chunk(2, -1)
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        queries, keys, values = (inputs @ own[f"self_attn.{part}_proj.weight"].T for part in "qkv")
        queries, keys = turned(queries.view(num, 4, dim)), turned(keys.view(num, 1, dim))
        scores = torch.einsum("qhd,kd->hqk", queries, keys[:, 0]) / dim**0.5
        scores = scores.masked_fill(torch.ones(num, num).triu(1).bool(), -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,kd->qhd", scores, values).reshape(num, -1)
        x = residual + mixed @ own["self_attn.o_proj.weight"].T
        inner = rms_norm(x, own["post_attention_layernorm.weight"], 1e-5)
        gate, up = (inner @ own[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return x + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T

    def propose(self, tokens: list[int], num_drafts: int) -> list[int]:
        with exact_math(torch.float64):
            states = self.whole.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
            features = torch.cat([states[layer][0] for layer in layers], -1) @ self.own["fc.weight"].T
            ids, drafts = tokens[1:], []
            for _ in range(num_drafts):
                x = self.layer(self.whole.model.embed_tokens.weight[ids], features)
                hidden = rms_norm(x[-1], self.own["norm.weight"], 1e-5)
                head = self.own.get("lm_head.weight", self.whole.lm_head.weight)
                best = int((head @ hidden).argmax())
                drafts.append(best + int(self.own["d2t"][best]) if "d2t" in self.own else best)
                ids = [*ids, drafts[-1]]
                features = torch.cat([features, x[-1:]])
        return drafts


class PlainEagle(PlainEagle3):
    """The same of version 1: from the last hidden state, without norms of the inputs and of the output."""

    def propose(self, tokens: list[int], num_drafts: int) -> list[int]:
        with exact_math(torch.float64):
            features = self.whole.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
            ids, drafts = tokens[1:], []
            for _ in range(num_drafts):
                both = torch.cat([self.whole.model.embed_tokens.weight[ids], features], -1)
                inputs = both @ self.own["fc.weight"].T + self.own.get("fc.bias", 0.0)
                x = self.after(inputs, inputs)
                drafts.append(int((self.whole.lm_head.weight @ x[-1]).argmax()))
                ids = [*ids, drafts[-1]]
                features = torch.cat([features, x[-1:]])
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


@pytest.fixture(scope="module", params=["mtp", "eagle3"])
def method(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mtp":
        model = write_mtp(folder)
        return Method(model, {"method": "mtp"}, PlainMtp(model))
    model = write_few(folder / "model")
    head = write_eagle3(folder / "head", model)
    return Method(model, {"method": "eagle3", "model": str(head)}, PlainEagle3(head, model))


def test_tokens_do_not_depend_on_the_drafter(method):
    with method.open(**PAIRED[1]) as llm:
        for params, results in zip((GREEDY, SAMPLED), method.wanted, strict=True):
            assert_same(llm.generate(PROMPTS, params), results)
        counts = llm.core.scheduler.drafts.counts
        assert 0 < counts.num_accepted < counts.num_drafts
        llm.core.scheduler.cache.check()


def test_proposals_are_those_of_the_reference(method):
    """After chunks, prefix hits, preemption, copied pages and partly accepted drafts."""
    with method.open(**PAIRED[0]) as llm:
        spy = DraftSpy(llm)
        for params in (SAMPLED, GREEDY):  # the second time prefixes are cached
            llm.generate(PROMPTS, params)
        assert llm.core.scheduler.cache.num_hits > 20
        counts = llm.core.scheduler.drafts.counts
        assert 0.05 < counts.num_accepted / counts.num_drafts < 0.95
    spy.check(method.reference, at_least=100, stride=9)


def test_captured_heads_give_the_same_tokens(method):
    device = ReplayDevice(1)
    with method.open(chunked=True, cached=True, depth=1, device=device) as llm:
        graphs = llm.core.executor.graphs
        graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        assert_same(llm.generate(PROMPTS, GREEDY), method.wanted[0])
        spy = DraftSpy(llm)
        assert_same(llm.generate(PROMPTS, GREEDY), method.wanted[0])
        captured = [key for key, entry in graphs._captured.items() if entry is not None]
        assert any(key[0] == "head" and key.drafts[:2] == (True, 3) for key in captured)
    assert len(spy.proposals) > 50
    for tokens, drafts in spy.proposals[::15]:
        assert len(tokens) > MAX_LEN - 3 or method.reference.propose(tokens, 3) == drafts


def test_memory_of_the_head_is_planned_to_the_byte(method):
    options = dict(model=method.model, speculative_config=method.spec, dtype="float64", num_pages=40, max_num_seqs=5)
    with method.open() as llm:
        config, memory = estimate_build(make_options(**options, max_model_len=llm.config.scheduler.max_model_len))
        assert config.cache.drops_last_page and config.draft.reads_hidden
        runner = llm.core.executor
        models = [runner.model, runner.find(HeadDrafter).model]
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        assert sum(tensor.nbytes for tensor in tensors) == memory.weights


def test_qwens_mtp_layer_over_recurrent_states(tmp_path):
    """Also after prefix hits, which continue from a checkpoint of the states, and partly accepted drafts."""
    model = write_mtp(tmp_path, "qwen3_5")
    shared = [(7 * i) % 251 for i in range(70)]
    prompts = [[*shared, 5], PROMPTS[0], [*shared[:66], 9], PROMPTS[5]]
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    reference = PlainMtp(model)
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    with make(str(model)) as plain, make(str(model), speculative_config=spec, cached=True, depth=1) as llm:
        llm.core.scheduler.drafts.length = None
        spy = DraftSpy(llm)
        for asked in (prompts[:2], prompts):
            assert_same(llm.generate(asked, params), plain.generate(asked, params))
        counts, hits = llm.core.scheduler.drafts.counts, llm.core.scheduler.cache.num_hits
        assert 0 < counts.num_accepted < counts.num_drafts and hits >= 64
    for tokens, drafts in spy.proposals[::4]:
        assert len(tokens) > MAX_LEN - 3 or reference.propose(tokens, 3) == drafts, f"after {len(tokens)} tokens"


def test_models_without_an_mtp_layer_are_refused(tmp_path):
    plain = write_tiny(tmp_path / "plain", "llama")
    with pytest.raises(InvalidOption, match="LlamaForCausalLM has no MTP layer"):
        estimate_build(make_options(model=str(plain), speculative_config={"method": "mtp"}))
    folder = write_mtp(tmp_path / "mtp")
    weights = load_file(folder / "model.safetensors")
    write_weights(folder, {name: tensor for name, tensor in weights.items() if "eh_proj" not in name})
    with pytest.raises(BadCheckpoint, match=r"draft model.*1 missing \(projection.weight"):
        make(str(folder), speculative_config={"method": "mtp"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidOption, match="num_nextn_predict_layers of config.json is 0"):
        estimate_build(make_options(model=str(folder), speculative_config={"method": "mtp"}))


def test_other_eagle3_heads(tmp_path):
    """The target's projection to tokens, an embedding of its own, the norm before the residual, other names."""
    model = write_few(tmp_path / "model")
    head = write_eagle3(tmp_path / "head", model, None, norm_before_residual=True)
    weights = load_file(head / "model.safetensors")
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    reference = PlainEagle3(head, model)
    renamed = {name.replace("midlayer", "layers.0"): tensor for name, tensor in weights.items()}
    write_weights(head, renamed | {"embed_tokens.weight": embedding.clone()})
    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    with make(str(model), speculative_config=spec, chunked=True) as llm:
        assert llm.core.executor.find(HeadDrafter).model.embedding is not None
        llm.core.scheduler.drafts.length = None
        spy = DraftSpy(llm)
        llm.generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=8))
    assert len(spy.proposals) > 10
    for tokens, drafts in spy.proposals[::3]:
        assert reference.propose(tokens, 2) == drafts


def test_eagle_heads_of_version_1(tmp_path):
    """After chunks, prefix hits, preemption and partly accepted drafts."""
    model = write_few(tmp_path / "model")
    head = write_eagle(tmp_path / "head", model)
    reference = PlainEagle(head, model)
    spec = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    with make(str(model)) as plain, make(str(model), speculative_config=spec, **PAIRED[0]) as llm:
        llm.core.scheduler.drafts.length = None
        spy = DraftSpy(llm)
        for params in (SAMPLED, GREEDY):
            assert_same(llm.generate(PROMPTS, params), plain.generate(PROMPTS, params))
        counts = llm.core.scheduler.drafts.counts
        assert 0 < counts.num_accepted < counts.num_drafts
    spy.check(reference, at_least=50, stride=9)


def test_eagle_heads_of_version_1_that_do_not_fit_are_refused(tmp_path):
    model = write_few(tmp_path / "model")
    for says, changed in (
        ("a hidden size of 32, and the model has 64", dict(hidden_size=32)),
        ("a vocabulary of 99, and the model has 304", dict(vocab_size=99)),
        ("has 2 layers", dict(num_hidden_layers=2)),
        ("add_para_norm", dict(add_para_norm=True)),
    ):
        head = write_eagle(tmp_path / "head", model, **changed)
        with pytest.raises(InvalidOption, match=says):
            estimate_build(make_options(model=str(model), speculative_config={"method": "eagle", "model": str(head)}))
    weights = load_file(write_eagle(tmp_path / "head", model) / "model.safetensors")
    write_weights(tmp_path / "head", weights | {"odd.weight": torch.zeros(2)})
    with pytest.raises(BadCheckpoint, match="which no EAGLE head has"):
        estimate_build(
            make_options(model=str(model), speculative_config={"method": "eagle", "model": str(tmp_path / "head")})
        )


def test_the_method_of_a_head_is_found_by_its_config(tmp_path):
    model = write_few(tmp_path / "model")
    eagle3, eagle = write_eagle3(tmp_path / "x-eagle3-y", model), write_eagle(tmp_path / "EAGLE-x", model)
    as_llama = write_eagle3(tmp_path / "head", model, architectures=["LlamaForCausalLM"])
    for head, given, found in (
        (eagle3, "eagle", "eagle3"),
        (eagle3, None, "eagle3"),
        (as_llama, "eagle3", "eagle3"),
        (as_llama, "eagle", "eagle3"),
        (as_llama, None, "eagle3"),
        (eagle, "eagle", "eagle"),
        (eagle, None, "eagle"),
        (model, None, "draft_model"),
    ):
        spec = {"model": str(head)} | ({"method": given} if given else {})
        config = estimate_build(make_options(model=str(model), speculative_config=spec))[0]
        assert config.draft.method == config.scheduler.drafts.method == found, f"{head.name} by {given}"
    spec = {"method": "eagle", "model": str(as_llama)}
    with make(str(model)) as plain, make(str(model), speculative_config=spec) as llm:
        assert_same(llm.generate(PROMPTS, GREEDY), plain.generate(PROMPTS, GREEDY))


def test_vectors_beside_a_drafter_with_taps(tmp_path):
    model = write_few(tmp_path / "model")
    spec = {"method": "eagle3", "model": str(write_eagle3(tmp_path / "head", model))}
    with make(str(model)) as plain, make(str(model), speculative_config=spec) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        wanted = [result.outputs.embedding for result in plain.embed(prompts)]
        for ours, theirs in zip(llm.embed(prompts), wanted, strict=True):
            torch.testing.assert_close(torch.tensor(ours.outputs.embedding), torch.tensor(theirs))


def test_eagle3_heads_that_do_not_fit_are_refused(tmp_path):
    model = write_few(tmp_path / "model")
    head = write_eagle3(tmp_path / "head", model)
    config, weights = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")

    def refuse(error, says, method="eagle3", tensors=weights, **changed):
        (head / "config.json").write_text(json.dumps(config | changed))
        write_weights(head, tensors)
        with pytest.raises(error, match=says):
            make(str(model), speculative_config={"method": method, "model": str(head)})

    refuse(InvalidOption, "for a hidden size of 32, and the model has 64", hidden_size=32)
    refuse(InvalidOption, "for a vocabulary of 99 tokens, and the model has 304", vocab_size=99, draft_vocab_size=60)
    refuse(InvalidOption, "its method is eagle3, not draft_model", "draft_model")
    refuse(InvalidOption, r"layers \(0, 1, 3\)", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 3]})
    refuse(InvalidOption, "has 2 layers", num_hidden_layers=2)
    refuse(InvalidOption, "norm_before_fc", norm_before_fc=True)
    refuse(BadCheckpoint, r"draft model.*1 missing \(fc.weight", tensors=without(weights, "fc.weight"))
    refuse(InvalidOption, "no lm_head.weight of its own", tensors=without(weights, "lm_head.weight"))
    refuse(BadCheckpoint, "which no EAGLE-3 head has", tensors=weights | {"odd.weight": torch.zeros(2)})
    refuse(BadCheckpoint, "d2t of the EAGLE-3 head", tensors=weights | {"d2t": weights["d2t"] + 400})
    refuse(BadCheckpoint, "of wrong shape", draft_vocab_size=61)


def without(weights, name):
    return {other: tensor for other, tensor in weights.items() if other != name}


def test_entries_of_another_continuation_are_not_reused_over_recurrent_states(tmp_path):
    """The entry of position 63 depends on token 64, which is on another page. Requests with the same first 64 tokens
    and different ones after them must not share the page that ends there."""
    model = write_mtp(tmp_path, "qwen3_5")
    shared = [(7 * i) % 251 for i in range(64)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    reference = PlainMtp(model)
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    with make(str(model), speculative_config=spec, cached=True) as llm:
        llm.core.scheduler.drafts.length = None
        spy = DraftSpy(llm)
        others = [[*shared, token, *range(20, 32)] for token in (40, 77, 150, 201, 9, 13)]
        for prompt in (others[0], *others[1:], *others[1:]):  # the last ones continue from the second ones
            llm.generate([prompt], params)
        assert llm.core.scheduler.cache.num_hits >= 5 * 64
        llm.core.scheduler.cache.check()
    for tokens, drafts in spy.proposals:
        assert reference.propose(tokens, 3) == drafts, f"after {tokens[60:]}"


def test_a_prompt_that_ends_at_a_border_is_found_again(tmp_path):
    """The hash of its last page covers the first generated token: the checkpoint is published once that is known."""
    model = write_mtp(tmp_path, "qwen3_5")
    prompt = [(11 * i) % 251 for i in range(64)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    with make(str(model), speculative_config=spec, cached=True, depth=1) as llm:
        llm.core.scheduler.drafts.length = None
        [first] = llm.generate([prompt], params)
        cache = llm.core.scheduler.cache
        before = cache.num_hits
        longer = [*prompt, *first.outputs[0].token_ids, 5]
        [cached] = llm.generate([longer], params)
        assert cache.num_hits - before == 64
        cache.check()
    with make(str(model)) as plain:
        assert_same(plain.generate([longer], params), [cached])


def test_steps_without_drafts_store_entries_only(tmp_path):
    """They compute no attention and no feed-forward of the head, and the next proposals are right."""
    model = write_few(tmp_path / "model")
    head = write_eagle3(tmp_path / "head", model)
    reference, num_plans = PlainEagle3(head, model), 0

    class Alternating:
        probed = ()

        def skip(self):
            return False

        def choose(self, counts, count_matched):
            nonlocal num_plans
            num_plans += 1
            return (3,) * 3 if num_plans % 7 > 3 else (0,) * 3, 3 if num_plans % 7 >= 3 else 0

        def add(self, seen):
            pass

        def cost(self, num_rows, num_drafts):
            return 0.0

    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with make(str(model), speculative_config=spec, chunked=True, cached=True) as llm:
        llm.core.scheduler.drafts.length = Alternating()
        drafter = llm.core.executor.find(HeadDrafter)
        run, propose, passes = drafter.model.run, drafter.propose, []
        drafter.model.run = lambda *args: (passes.append(1), run(*args))[1]
        by_drafts: dict[int, int] = {}

        def counted(batch, num_drafts):
            before = len(passes)
            propose(batch, num_drafts)
            by_drafts[num_drafts] = by_drafts.get(num_drafts, 0) + len(passes) - before

        drafter.propose = counted
        spy = DraftSpy(llm)
        llm.generate(PROMPTS, GREEDY)
        assert by_drafts[0] == 0 and len(passes) == by_drafts[3] > 10, "prompt chunks and plain steps run no pass"
    spy.check(reference, at_least=10, stride=5)
