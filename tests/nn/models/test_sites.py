"""Models whose layers share cache sites or have heads of several sizes, against plain torch; and through an engine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hand_batch import HandRunner
from hand_load import load
from law7 import PAIRED, PROMPTS, options_of
from plain_decoder import plain_logits
from slipstream import LLM, SamplingParams
from slipstream.config.model_info import ModelInfo, read_model_info
from slipstream.errors import UnsupportedModel
from slipstream.nn.models import registry
from slipstream.nn.models.decoder import Decoder
from slipstream.nn.models.decoder_shape import DecoderShape, RopeShape
from slipstream.nn.models.llama import llama_rules, llama_shape
from slipstream.nn.models.registry import Family
from slipstream.nn.shapes import AttentionShape
from slipstream.nn.weights.rules import Rules
from slipstream.ops import native
from slipstream.scheduler.cache.layout import group_sites
from tiny import write_tiny, write_weights


def shared(info: ModelInfo) -> DecoderShape:
    """Layers 2 and 3 read the keys and values of layer 1."""
    return change_mixers(info, lambda layer, mixer: replace(mixer, kv_source=1) if layer >= 2 else mixer)


def alternating(info: ModelInfo) -> DecoderShape:
    """Every second layer has larger heads, and fewer of them."""

    def change(layer: int, mixer: AttentionShape) -> AttentionShape:
        wide = replace(mixer, num_heads=2, num_kv_heads=1, head_dim=32, scale=32**-0.5, rope=1)
        return wide if layer % 2 else mixer

    ropes = (RopeShape(info.rope, 16), RopeShape(info.rope, 32))
    return replace(change_mixers(info, change), ropes=ropes)


def mixed(info: ModelInfo) -> DecoderShape:
    """Both: windows and caps in the narrow layers, and the last two read the site of the layer of their own kind."""

    def change(layer: int, mixer: AttentionShape) -> AttentionShape:
        changed = alternating(info).layers[layer].mixers[0]
        if layer % 2 == 0:
            changed = replace(changed, window=6, soft_cap=2.0)
        return replace(changed, kv_source=layer - 2 if layer >= 2 else None)

    return replace(change_mixers(info, change), ropes=alternating(info).ropes)


def with_sinks(info: ModelInfo) -> DecoderShape:
    """Sinks in all layers, a window in every second, and the last layer reads the site of layer 1."""

    def change(layer: int, mixer: AttentionShape) -> AttentionShape:
        source = 1 if layer == 3 else None
        return replace(mixer, sinks=True, window=0 if layer % 2 else 6, kv_source=source)

    return change_mixers(info, change)


def rules(shape: DecoderShape) -> Rules:
    return llama_rules(shape, {"model.layers.{n}.self_attn.sinks": "layers.{n}.attention.sinks"})


def change_mixers(info: ModelInfo, change: Callable[[int, AttentionShape], AttentionShape]) -> DecoderShape:
    shape = llama_shape(info)
    layers = (
        replace(layer, mixers=tuple(change(number, mixer) for mixer in layer.mixers))
        for number, layer in enumerate(shape.layers)
    )
    return replace(shape, layers=tuple(layers))


MODELS = {"shared": shared, "alternating": alternating, "mixed": mixed, "sinks": with_sinks}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a family that is known for one test, with tensors of Llama's names."""
    make_shape = MODELS[request.param]
    monkeypatch.setitem(registry.DECODERS, "Sites", Family(make_shape, rules))
    write_tiny(tmp_path, "llama", num_hidden_layers=4)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["SitesForCausalLM"]}))
    write_weights(tmp_path, weights(make_shape(read_model_info(tmp_path))))
    return tmp_path


def weights(shape: DecoderShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random_tensor(*sizes: int, middle: float = 0.0) -> torch.Tensor:
        return torch.randn(sizes, generator=generator) * 0.15 + middle

    hidden = shape.hidden_size
    made = {
        "model.embed_tokens.weight": random_tensor(shape.vocab_size, hidden) * 2,
        "lm_head.weight": random_tensor(shape.vocab_size, hidden) * 2,
        "model.norm.weight": random_tensor(hidden, middle=1.0),
    }
    for number, layer in enumerate(shape.layers):
        (mixer,), feed, prefix = layer.mixers, layer.feed, f"model.layers.{number}"
        assert feed is not None
        queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        own = {} if mixer.kv_source is not None else {"k": keys, "v": keys}
        for part, size in ({"q": queries} | own).items():
            made[f"{prefix}.self_attn.{part}_proj.weight"] = random_tensor(size, hidden)
        if mixer.sinks:
            made[f"{prefix}.self_attn.sinks"] = random_tensor(mixer.num_heads) * 10
        made[f"{prefix}.self_attn.o_proj.weight"] = random_tensor(hidden, queries)
        for part in ("gate", "up"):
            made[f"{prefix}.mlp.{part}_proj.weight"] = random_tensor(feed.size, hidden)
        made[f"{prefix}.mlp.down_proj.weight"] = random_tensor(hidden, feed.size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}.{norm}.weight"] = random_tensor(hidden, middle=1.0)
    return made


TEXTS = {name: [random.Random(name).randrange(300) for _ in range(n)] for name, n in (("a", 33), ("b", 9), ("c", 1))}
STEPS: list[dict[str, int]] = [{"a": 7}, {"a": 1, "b": 8}, {"c": 1, "b": 1, "a": 24}, {"a": 1}]


@pytest.mark.parametrize("in_place", [False, True], ids=["gathered", "in place"])
def test_logits_equal_plain_torch_however_texts_are_cut(folder: Path, in_place: bool) -> None:
    """In float64 keys are gathered from the pages; in float32 the C kernel reads them in place."""
    if in_place and not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    exact = load(folder, torch.float64)
    expected = {name: plain_logits(exact, ids) for name, ids in TEXTS.items()}
    dtype, tolerance = (torch.float32, 1e-3) if in_place else (torch.float64, 1e-9)
    model = load(folder, dtype)
    whole = HandRunner(model, dtype).run({name: TEXTS[name] for name in ("c", "b", "a")})
    for name, logits in whole.items():
        torch.testing.assert_close(logits.double(), expected[name], rtol=0, atol=tolerance)
    for run in (HandRunner.run, HandRunner.run_last):
        runner = HandRunner(model, dtype, slack=3)
        place = dict.fromkeys(TEXTS, 0)
        for step in STEPS:
            chunks = {name: TEXTS[name][place[name] : place[name] + size] for name, size in step.items()}
            for name, logits in run(runner, chunks).items():
                place[name] += step[name]
                last = logits if run is HandRunner.run_last else logits[-1]
                torch.testing.assert_close(last.double(), expected[name][place[name] - 1], rtol=0, atol=tolerance)


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)


def generate(folder: Path, **cell: Any) -> tuple[list[Any], int]:
    """The results of two calls, and how many requests were preempted."""
    with LLM(str(folder), use_tqdm_on_load=False, max_model_len=80, **options_of(few_pages=22, **cell)) as llm:
        results = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2)]  # the second time from the cache
        llm.core.scheduler.cache.check()
        return results, llm.core.scheduler.num_preemptions


def test_tokens_are_those_of_plain_torch_in_every_cell_of_law_7(folder: Path) -> None:
    model = load(folder, torch.float64)
    expected = [continue_plainly(model, prompt, GREEDY.max_tokens or 0) for prompt in PROMPTS]
    num_preempted = 0
    for cell in ({"batched": False}, *PAIRED[:4]):
        both, num = generate(folder, **cell)
        num_preempted += num
        for results in both:
            assert [result.outputs[0].token_ids for result in results] == [tokens for tokens, _ in expected], cell
            for result, (tokens, logprobs) in zip(results, expected, strict=True):
                for step, token, logprob in zip(result.outputs[0].logprobs, tokens, logprobs, strict=True):
                    assert abs(step[token].logprob - logprob) < 1e-9
    assert num_preempted > 0


def continue_plainly(model: Decoder, prompt: list[int], num: int) -> tuple[list[int], list[float]]:
    ids, logprobs = list(prompt), []
    for _ in range(num):
        last = plain_logits(model, ids)[-1].log_softmax(-1)
        ids.append(int(last.argmax()))
        logprobs.append(float(last.max()))
    return ids[len(prompt) :], logprobs


INFO = ModelInfo(
    architecture="LlamaForCausalLM", vocab_size=9, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_size=8, max_positions=8, norm_eps=1e-5, activation="silu", tied_embeddings=True,
)  # fmt: skip


def test_sites_and_groups() -> None:
    info = INFO
    assert shared(info).sites == ((0,), (1,), (1,), (1,))
    assert len(shared(info).cache_specs(16, "float32")) == 2
    groups = group_sites(alternating(info).cache_specs(16, "bfloat16"))
    assert [(group.spec.head_dim, group.sites) for group in groups] == [(16, (0, 2)), (32, (1, 3))]
    assert groups[0].bytes_per_page == 2 * (2 * 2 * 16 * 2 * 16)
    assert mixed(info).sites == ((0,), (1,), (0,), (1,))


@pytest.mark.parametrize("source", [1, 2, 7, -1])
def test_a_source_that_cannot_be_read_is_named(source: int) -> None:
    """Another head size; itself; a layer that does not exist."""
    shape = alternating(INFO)
    layers = list(shape.layers)
    layers[2] = replace(layers[2], mixers=(replace(layers[2].mixers[0], kv_source=source),))
    with pytest.raises(UnsupportedModel, match=f"layer 2 reads the keys and values of layer {source}"):
        replace(shape, layers=tuple(layers)).sites  # noqa: B018
