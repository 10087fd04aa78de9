"""Logits processors of the user on a real model: the same tokens under any scheduling, errors that name the cause."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import sys
from types import ModuleType

import pytest
import torch

from delayed_device import DelayedDevice
from law7 import PAIRED, PROMPTS, options_of
from repeats import slow
from replay_device import ReplayDevice
from slipstream import LLM, AdapterLogitsProcessor, LogitsProcessor, SamplingParams
from slipstream.base.errors import InvalidOption, InvalidParams
from slipstream.scheduler.request_processors import installed
from tiny import write_tiny

VOCAB = 304


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def make(model, *, engine=None, few_pages=26, device=None, tensor_parallel_size=1, **cell):
    options = options_of(few_pages=few_pages, **cell) | {"tensor_parallel_size": tensor_parallel_size}
    return LLM(model, use_tqdm_on_load=False, max_model_len=96, logits_processors=engine, _device=device, **options)


def key_of(*tokens):
    return int.from_bytes(hashlib.blake2b(repr(tokens).encode(), digest_size=4).digest(), "little")


class Watermark(AdapterLogitsProcessor):
    """Raises the logits of a part of the vocabulary that depends on all tokens before; for requests that ask for it."""

    def is_argmax_invariant(self):
        return False

    @classmethod
    def validate_params(cls, sampling_params):
        if not isinstance((sampling_params.extra_args or {}).get("watermark", ""), str):
            raise ValueError("watermark is a text")

    def new_req_logits_processor(self, params):
        if "watermark" not in (params.extra_args or {}):
            return None
        secret = params.extra_args["watermark"]

        def mark(prompt, output, logits):
            start = key_of(secret, prompt, output) % VOCAB
            logits[[(start + i) % VOCAB for i in range(0, VOCAB, 3)]] += 2.0
            return logits

        return mark


class Sharpen(LogitsProcessor):
    """Batched and after the temperature: squares what is above the mean, by a strength per request."""

    def __init__(self, config, device, is_pin_memory):
        self.device = device
        self.strength = {}

    def is_argmax_invariant(self):
        return True

    def is_needed_by(self, sampling_params):
        return "strength" in (sampling_params.extra_args or {})

    def update_state(self, batch_update):
        if batch_update is not None:
            for index in batch_update.removed:
                del self.strength[index]
            for index, params, _, output in batch_update.added:
                self.strength[index] = params.extra_args["strength"], output
            for source, target, _ in batch_update.moved:
                self.strength[target] = self.strength.pop(source)

    def apply(self, logits):
        assert sorted(self.strength) == list(range(len(logits)))
        own = [strength + 0.01 * (sum(output) % 7) for _, (strength, output) in sorted(self.strength.items())]
        return logits * torch.tensor(own, dtype=logits.dtype, device=self.device)[:, None]


def narrow(prompt, output):
    """Only tokens of a range that depends on all tokens before."""
    start = key_of(prompt, output) % 200
    return range(start, start + 90)


def prefer(output):
    return {key_of(output) % VOCAB: 3.0, 9: -float("inf")}


narrow.needs = prefer.needs = "tokens"

MIXED = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2, extra_args={"watermark": "a"}),
    SamplingParams(seed=5, max_tokens=16, ignore_eos=True, n=2, extra_args={"watermark": "b", "strength": 1.5}),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logits_processors=[narrow, prefer]),
    SamplingParams(seed=6, max_tokens=16, ignore_eos=True, repetition_penalty=1.3, logits_processors=[prefer, narrow]),
    SamplingParams(seed=7, top_k=30, max_tokens=16, ignore_eos=True, extra_args={"strength": 0.7}),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
]


def flat(results):
    return [(sample.token_ids, sample.finish_reason) for result in results for sample in result.outputs]


@pytest.fixture(scope="module")
def wanted(model):
    with make(model, engine=[Watermark, Sharpen], batched=False) as llm:
        found = flat(llm.generate(PROMPTS, MIXED, use_tqdm=False))
        plain = [params.with_changes(extra_args=None, logits_processors=None) for params in MIXED]
        without = flat(llm.generate(PROMPTS, plain, use_tqdm=False))
    assert [a == b for a, b in zip(found, without, strict=True)] == [False] * 6 + [True]
    return found


@pytest.mark.parametrize(
    "cell", [*PAIRED[:3], *map(slow, PAIRED[3:])], ids=lambda cell: "-".join(map(str, cell.values()))
)
def test_tokens_do_not_depend_on_scheduling(model, wanted, cell):
    with make(model, engine=[Watermark, Sharpen], **cell) as llm:
        for _ in range(1 + cell["cached"]):  # the second time the cache is warm
            assert flat(llm.generate(PROMPTS, MIXED, use_tqdm=False)) == wanted
        if cell["preempted"] and cell["batched"]:
            assert llm.core.scheduler.num_preemptions > 0
        assert llm.core.constraints.num_live == 0


def test_tokens_are_the_same_on_a_device_that_is_late_at_random(model, wanted):
    """Buffers of late data that are reused too early would show."""
    with make(model, engine=[Watermark, Sharpen], depth=2, preempted=True, device=DelayedDevice(2)) as llm:
        assert flat(llm.generate(PROMPTS, MIXED, use_tqdm=False)) == wanted


def test_masks_and_biases_are_the_same_in_a_captured_head(model, wanted):
    device = ReplayDevice(1)
    with make(model, engine=[Watermark, Sharpen], depth=1, device=device) as llm:
        own = [params for params in MIXED if params.logits_processors]
        graphs = llm.core.executor.graphs
        graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        results = llm.generate(PROMPTS[2:4], own, use_tqdm=False)
        heads = [key.sampling for key, entry in graphs._captured.items() if key[0] == "head" and entry]
    assert flat(results) == wanted[3:5]
    assert any("host_bias" in key and "grammar" in key for key in heads)


@pytest.fixture(scope="module", params=[0, 1, 2])
def llm(request, model):
    with make(model, engine=[Watermark, f"{__name__}:Sharpen"], depth=request.param) as llm:
        yield llm


def test_forbidden_tokens_stay_forbidden(llm):
    def lift(output, logits):
        return torch.zeros_like(logits)

    params = SamplingParams(seed=1, max_tokens=12, allowed_token_ids=[5, 6, 7], logits_processors=[lift])
    assert set(llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0].token_ids) <= {5, 6, 7}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda logits: None, "it returned NoneType"),
        (lambda logits: logits[:5], r"a tensor of \(5,\)"),
        (lambda logits: logits.long(), "torch.int64"),
        (lambda logits: 1 / 0, "ZeroDivisionError"),
        (lambda logits: logits[10**6], "IndexError"),
    ],
)
def test_an_error_names_the_processor_and_ends_its_request_only(llm, result, words):
    def broken(output, logits):
        return result(logits) if len(output) == 2 else logits

    good = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    both = [good.with_changes(logits_processors=[broken]), good]
    bad, other = llm.generate([[1, 2], [3, 4]], both, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and len(bad.outputs[0].token_ids) == 2
    assert other.outputs[0].token_ids == llm.generate([[3, 4]], good, use_tqdm=False)[0].outputs[0].token_ids
    error = bad.outputs[0].stop_reason
    assert re.search(words, error) and "broken" in error and "at output token 2" in error


@pytest.mark.parametrize("call", ["generate", "close", "reset_prefix_cache"])
def test_a_processor_that_calls_its_own_engine_ends_its_request_only(llm, call):
    def own(output, logits):
        llm.generate([[5]], use_tqdm=False) if call == "generate" else getattr(llm, call)()
        return logits

    params = SamplingParams(temperature=0, max_tokens=4)
    asked = [params, params.with_changes(logits_processors=[own])]
    other, failed = (result.outputs[0] for result in llm.generate([[7, 9]] * 2, asked, use_tqdm=False))
    assert failed.finish_reason == "error" and "cannot call its own LLM" in failed.stop_reason
    assert other.token_ids == llm.generate([[7, 9]], params, use_tqdm=False)[0].outputs[0].token_ids


def test_requests_are_refused_where_they_are_submitted(llm):
    with pytest.raises(InvalidParams, match="Watermark refuses the request: ValueError: watermark is a text"):
        llm.generate([[1]], SamplingParams(extra_args={"watermark": 3}), use_tqdm=False)
    for given, words in (([3], "callables"), ("ab", "callables"), (len, "callables")):
        with pytest.raises(InvalidParams, match=words):
            SamplingParams(logits_processors=given)
    with pytest.raises(InvalidParams, match="extra_args"):
        SamplingParams(extra_args=[1])


def test_a_clone_is_made_for_each_sample(llm):
    class Stateful:
        made = 0

        def __init__(self):
            self.calls = 0

        def clone(self):
            Stateful.made += 1
            return Stateful()

        def __call__(self, output, logits):
            assert len(output) == self.calls
            self.calls += 1
            return logits

    params = SamplingParams(seed=3, n=3, max_tokens=5, ignore_eos=True, logits_processors=[Stateful()])
    outputs = llm.generate([[1, 2], [4]], params, use_tqdm=False)
    assert {sample.finish_reason for result in outputs for sample in result.outputs} == {"length"}
    assert Stateful.made == 6


def test_an_engine_without_processors_takes_extra_args(model):
    with make(model) as llm:
        plain, given = (
            llm.generate([[1]], SamplingParams(seed=3, max_tokens=4, extra_args=args), use_tqdm=False)
            for args in (None, {"a": 1})
        )
    assert plain[0].outputs[0].token_ids == given[0].outputs[0].token_ids


class NoApply(LogitsProcessor):
    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass


class Unmade(AdapterLogitsProcessor):
    def __init__(self, config, device, is_pin_memory):
        raise RuntimeError("no licence")

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nowhere.at.all:Class"], "cannot be imported: ModuleNotFoundError"),
        ([f"{__name__}:Nothing"], "cannot be imported: AttributeError"),
        (["json"], "package.module:Class"),
        (["json:dumps"], "inherit slipstream.LogitsProcessor"),
        ([int], "inherit slipstream.LogitsProcessor"),
        ([len], "it takes classes"),
        ([NoApply], "NoApply has no method apply"),
        ([Unmade], "Unmade cannot be made: RuntimeError: no licence"),
    ],
)
def test_wrong_classes_are_refused_at_the_start(model, given, words):
    with pytest.raises(InvalidOption, match=words):
        make(model, engine=given)


def test_installed_packages_add_processors(model, monkeypatch):
    module = ModuleType("some_plugin")
    module.Watermark = Watermark
    monkeypatch.setitem(sys.modules, "some_plugin", module)
    group = "slipstream.logits_processors"
    entry = importlib.metadata.EntryPoint("mark", "some_plugin:Watermark", group)
    found = {group: [entry]}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: found.get(group, []))
    installed.cache_clear()
    try:
        with make(model) as llm:
            marked, plain = llm.generate([[1, 2]] * 2, [MIXED[0], MIXED[-1]], use_tqdm=False)
    finally:
        installed.cache_clear()
    assert marked.outputs[0].token_ids != plain.outputs[0].token_ids


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options", [dict(depth=0, enforce_eager=True), dict(depth=1), dict(depth=2, num_pages=40)], ids=str
)
def test_tokens_on_a_gpu_are_those_of_the_cpu(tmp_path, options):
    folder = str(write_tiny(tmp_path, "llama", hidden_size=256))
    common = dict(use_tqdm_on_load=False, max_model_len=96, max_num_seqs=8, num_pages=400, page_size=4, dtype="float32")
    found = []
    for device, more in (("cpu", {"num_threads": 1}), ("cuda", options)):
        with LLM(folder, device=device, logits_processors=[Watermark, Sharpen], **(common | more)) as llm:
            found.append([flat(llm.generate(PROMPTS, MIXED, use_tqdm=False)) for _ in range(3)])
            only_tokens = [params for params in MIXED if params.logits_processors]
            found[-1].append([flat(llm.generate(PROMPTS[2:4], only_tokens, use_tqdm=False)) for _ in range(3)])
            assert not llm.core.executor.graphs.gave_up
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]
