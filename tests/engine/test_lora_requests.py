"""LoRA adapters of requests: the same tokens as merged weights, in every mix and order; errors harm no other."""

from __future__ import annotations

import time

import pytest
import torch

from delayed_device import DelayedDevice
from law7 import PROMPTS, options_of
from law7_engine import preempt_after
from replay_device import ReplayDevice
from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.base.errors import InvalidAdapter, InvalidOption, InvalidParams
from slipstream.contracts.messages import Submit
from slipstream.runner.lora_store import AdapterStore
from tiny import write_tiny
from tiny_adapter import LLAMA_MODULES, merge, write_adapter
from tiny_encoder import write_tiny_encoder

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2, prompt_logprobs=1)
NUM_ADAPTERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama", torch.float64)


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    """Adapters of several ranks; the last changes the embedding and the head too."""
    folder = tmp_path_factory.mktemp("adapters")
    found = []
    for number in range(NUM_ADAPTERS):
        is_last = number == NUM_ADAPTERS - 1
        modules = [*LLAMA_MODULES, "lm_head"] if is_last else LLAMA_MODULES[number:]
        path = write_adapter(
            folder / f"a{number}",
            model,
            modules,
            rank=2 + number,
            seed=number,
            embeddings=["model.embed_tokens"] if is_last else (),
        )
        found.append(LoRARequest(f"a{number}", number + 1, str(path)))
    return found


def start(model, device=None, **options):
    cell = {
        name: options.pop(name) for name in ("batched", "chunked", "cached", "preempted", "depth") if name in options
    }
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8} if options.pop("lora", True) else {}
    given = options_of(few_pages=26, **cell) | lora | options
    return LLM(str(model), use_tqdm_on_load=False, max_model_len=96, _device=device, **given)


def flat(results):
    """Tokens, and logprobs of all tokens."""
    found = []
    for result in results:
        sample = result.outputs[0]
        steps = [*(sample.logprobs or []), *(step for step in result.prompt_logprobs or [] if step is not None)]
        found.append((sample.token_ids, [{t: e.logprob for t, e in step.items()} for step in steps]))
    return found


@pytest.fixture(scope="module")
def wanted(model, adapters, tmp_path_factory):
    """By adapter, None for the base model: what merged weights give for each prompt."""
    folder = tmp_path_factory.mktemp("merged")
    found = {}
    for lora in (None, *adapters):
        path = model if lora is None else merge(model, folder.parent / lora.lora_path, folder / lora.lora_name)
        with start(path, lora=False) as llm:
            found[lora] = flat(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert len({str(tokens) for results in found.values() for tokens, _ in results}) > 3 * len(PROMPTS)
    return found


def check(results, loras, wanted):
    for index, (lora, (tokens, steps)) in enumerate(zip(loras, flat(results), strict=True)):
        right_tokens, right_steps = wanted[lora][index % len(PROMPTS)]
        assert tokens == right_tokens, f"prompt {index} with {lora}"
        for own, right in zip(steps, right_steps, strict=True):
            assert own.keys() == right.keys() and all(abs(own[t] - right[t]) < 1e-9 for t in own)


def mixed(adapters, num=6):
    choices = [None, *adapters]
    return [choices[(index * 3 + index // 4) % len(choices)] for index in range(num)]


CELLS = [
    {"batched": True, "depth": 0},
    {"batched": True, "chunked": True, "cached": True, "preempted": True, "depth": 2},
    {"batched": False, "depth": 1},
    {"batched": True, "cached": True, "preempted": True, "depth": 1, "max_loras": 1},
    {"batched": True, "depth": 1, "max_loras": 3, "drafts": "ngram:2"},
]


def test_a_step_waits_for_the_load_of_its_adapter(model, adapters, wanted):
    device = DelayedDevice(2, longest=0.0)
    with start(model, device, batched=True, depth=2, max_loras=1, max_cpu_loras=3) as llm:
        llm.core.executor.find(AdapterStore)._stream.before = lambda: time.sleep(0.004)
        loras = [*adapters, *adapters[:2]]
        results = [llm.generate(PROMPTS[i], GREEDY, use_tqdm=False, lora_request=lora) for i, lora in enumerate(loras)]
        for index, (lora, result) in enumerate(zip(loras, results, strict=True)):
            assert flat(result)[0][0] == wanted[lora][index][0], f"prompt {index} with {lora}"


@pytest.mark.parametrize("cell", CELLS)
def test_a_mixed_batch_gives_what_merged_weights_give(model, adapters, wanted, cell):
    loras = mixed(adapters, 2 * len(PROMPTS))
    device = DelayedDevice(2) if cell["depth"] == 2 else None
    with start(model, device, **cell) as llm:
        if "preempted" in cell:
            preempt_after(llm, 12)
        results = llm.generate(PROMPTS * 2, GREEDY, use_tqdm=False, lora_request=loras)
        llm.core.scheduler.check()
        again = llm.generate(PROMPTS * 2, GREEDY, use_tqdm=False, lora_request=loras[::-1])
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.core.scheduler.check()
        assert llm.core.scheduler.num_preemptions or "preempted" not in cell
    assert [result.lora_request for result in results] == loras
    check(results, loras, wanted)
    check(again, loras[::-1], wanted)
    check(plain, [None] * len(PROMPTS), wanted)


@pytest.mark.parametrize("whole", [True, False], ids=["one graph", "two graphs"])
def test_captured_steps_with_and_without_adapters(model, adapters, wanted, whole):
    device = ReplayDevice(1)
    params = GREEDY.with_changes(prompt_logprobs=None)
    right = {lora: [(tokens, steps[: len(tokens)]) for tokens, steps in own] for lora, own in wanted.items()}
    with start(model, device, depth=1) as llm:
        llm.core.executor.graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        llm.core.executor.whole_steps = whole
        for loras in ([None] * 6, mixed(adapters), [adapters[0]] * 6, [None] * 6, mixed(adapters)[::-1]):
            check(llm.generate(PROMPTS, params, use_tqdm=False, lora_request=loras), loras, right)
        captured = {key for key, entry in llm.core.executor.graphs._captured.items() if entry is not None}
    bodies = [key for key in captured if key[0] == ("step" if whole else "forward")]
    assert any("adapted" in key for key in bodies) and any("adapted" not in key for key in bodies)
    assert device.num_replays > 10


def test_prefixes_are_cached_by_the_content_of_the_adapter(model, adapters, tmp_path):
    import shutil

    copied = shutil.copytree(adapters[0].lora_path, tmp_path / "copy")
    same = LoRARequest("copy", 9, str(copied))
    with start(model, cached=True, depth=0) as llm:
        prompt = list(range(40, 80))

        def num_cached(lora):
            params = SamplingParams(max_tokens=2, temperature=0)
            return llm.generate([prompt], params, use_tqdm=False, lora_request=lora)[0].num_cached_tokens

        assert [num_cached(lora) for lora in (None, adapters[0], adapters[1], same, None)] == [0, 0, 0, 36, 36]


def test_a_bad_adapter_fails_its_own_requests_only(model, adapters, wanted, tmp_path):
    bad = LoRARequest("bad", 7, str(tmp_path / "nothing"))
    with start(model, depth=1) as llm:
        core = llm.core
        for index, lora in enumerate((adapters[0], bad, None)):
            core.submit(Submit(str(index), PROMPTS[index], GREEDY, 0.0, lora=lora))
        outputs = []
        while core.has_requests():
            outputs += core.step()
            core.scheduler.check()
        tokens = {name: [t for out in outputs if out.request_id == name for t in out.token_ids] for name in "012"}
        assert tokens == {"0": wanted[adapters[0]][0][0], "1": [], "2": wanted[None][2][0]}
        (error,) = [out for out in outputs if out.request_id == "1"]
        assert "has no adapter_config.json" in error.error and error.param == "lora_request"
        with pytest.raises(InvalidParams, match="has no adapter_config.json"):
            llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=[None, bad])
        write_adapter(tmp_path / "nothing", model, LLAMA_MODULES[:2])  # it is read again
        results = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=bad)
        assert results[0].outputs[0].finish_reason == "length"


def test_what_is_refused_at_once(model, adapters):
    with pytest.raises(InvalidOption, match="enable_lora"):
        start(model, lora=False, max_loras=2)
    with pytest.raises(InvalidOption, match="max_cpu_loras"):
        start(model, max_loras=3, max_cpu_loras=2)
    with pytest.raises(InvalidOption, match="max_lora_rank is 300"):
        start(model, max_lora_rank=300)
    with start(model, lora=False) as llm, pytest.raises(InvalidAdapter, match="takes no adapters"):
        llm.generate([[1]], GREEDY, lora_request=adapters[0])
    for bad in (("", 1, "x"), ("a", 0, "x"), ("a", True, "x"), ("a", 1, ""), ("a", 1, "\0"), ("\ud800", 1, "x")):
        with pytest.raises(InvalidAdapter):
            LoRARequest(*bad)


def test_pooling_with_adapters(tmp_path):
    folder = write_tiny_encoder(tmp_path / "base", "bert", dtype=torch.float64)
    modules = [f"encoder.layer.{n}.attention.self.{part}" for n in range(3) for part in ("query", "value")]
    paths = [write_adapter(tmp_path / f"a{seed}", folder, modules, seed=seed) for seed in range(2)]
    loras = [None, *(LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1))]
    texts = [[5, 6, 7], [9], [200, 30, 40, 50]]
    right = []
    for path in (folder, *(merge(folder, path, tmp_path / f"merged-{path.name}") for path in paths)):
        with LLM(str(path), task="embed", dtype="float64", use_tqdm_on_load=False) as llm:
            right.append([each.outputs.data for each in llm.embed(texts, use_tqdm=False)])
    with LLM(
        str(folder), task="embed", dtype="float64", enable_lora=True, max_loras=1, max_cpu_loras=1, depth=1,
        use_tqdm_on_load=False,
    ) as llm:  # fmt: skip
        for lora, vectors in [*zip(loras, right, strict=True)] * 2:
            found = llm.embed(texts, use_tqdm=False, lora_request=lora)
            for own, vector in zip(found, vectors, strict=True):
                assert abs(own.outputs.data - vector).max() < 1e-9
        llm.core.scheduler.check()
        bad = LoRARequest("bad", 5, str(tmp_path))
        with pytest.raises(Exception, match="adapter_config"):
            [each.outputs.data for each in llm.embed(texts, use_tqdm=False, lora_request=bad)]
        llm.core.scheduler.check()
    assert abs(right[0][0] - right[1][0]).max() > 1e-3
