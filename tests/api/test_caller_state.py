"""Torch's state of the thread that calls an LLM: unchanged by every public method, and without effect on results."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch

from child import child_env
from patience import PATIENCE
from slipstream import LLM, AsyncEngine, BeamSearchParams, SamplingParams
from slipstream.device.device import engine_state, enter_for_good
from slipstream.engine.lanes import Lanes
from tiny import write_tiny
from tiny_encoder import write_modules, write_tiny_encoder

# room for the prompt of a decision, in bytes
SMALL = dict(max_model_len=128, num_pages=64, page_size=4, max_num_seqs=4, num_threads=3, use_tqdm_on_load=False)
FOUR = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
PROMPT = list(range(5, 22))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny(root / "chat", "llama")
    write_modules(write_tiny_encoder(root / "embed"), "mean")
    write_tiny_encoder(root / "score", task="ForSequenceClassification", num_labels=1)
    options = {
        "chat": {"record_steps": 8},
        "embed": {"task": "embed"},
        "score": {"task": "classify"},
    }
    return {name: {"model": str(root / name), "enable_sleep_mode": True, **each} for name, each in options.items()}


def state():
    threads = []
    thread = threading.Thread(target=lambda: threads.append((torch.get_num_threads(), torch.is_grad_enabled())))
    thread.start()
    thread.join()
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "a new thread": threads[0],
        "interop": torch.get_num_interop_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "rng": torch.random.get_rng_state().tolist(),
        "anomaly": torch.is_anomaly_enabled(),
        "flush": torch.tensor([1e-40], device="cpu").mul(1).item() > 0,
    }


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


CALLERS = {
    "trains": nullcontext,
    "has two threads": lambda: threads(2),
    "infers": torch.inference_mode,
    "has no gradients": torch.no_grad,
    "computes in float64": lambda: default_dtype(torch.float64),
    "casts": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "is elsewhere": lambda: torch.device("meta"),
}


def generated(results):
    return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in results]


def traced(llm, tmp):
    with llm.trace(tmp / "trace.json"):
        return generated(llm.generate([PROMPT], FOUR, use_tqdm=False))


def stepped(llm):
    engine = llm.llm_engine
    engine.add_request("one", {"prompt_token_ids": PROMPT}, FOUR)
    results = []
    while engine.has_unfinished_requests():
        results = engine.step()
    return generated(results)


def streamed(llm, state_inside):
    """Between two results the state is the caller's as well."""
    before, results = state(), []
    for result in llm.stream(PROMPT, FOUR):
        state_inside(before)
        results.append(result)
    return generated(results[-1:])


def changed(before):
    """The parts of the state that differ, with both values."""
    now = state()
    return {name: (before[name], now[name]) for name in now if before[name] != now[name]}


def assert_same(before):
    assert not changed(before)


MESSAGES = [{"role": "user", "content": "hello"}]
CALLS = {
    "generate": lambda llm, tmp: generated(llm.generate([PROMPT, PROMPT[2:]], FOUR, use_tqdm=False)),
    "chat": lambda llm, tmp: generated(llm.chat(MESSAGES, FOUR, use_tqdm=False)),
    "stream": lambda llm, tmp: streamed(llm, assert_same),
    "stream_chat": lambda llm, tmp: generated(list(llm.stream_chat(MESSAGES, FOUR))[-1:]),
    "beam_search": lambda llm, tmp: llm.beam_search([PROMPT], BeamSearchParams(2, 3))[0].sequences[0].tokens,
    "llm_engine": lambda llm, tmp: stepped(llm),
    "decide": lambda llm, tmp: llm.decide("a", [{"type": "predicate", "instructions": "b"}]),
    "encode": lambda llm, tmp: llm.encode([PROMPT], model="embed", pooling_task="embed")[0].outputs.data.tolist(),
    "embed": lambda llm, tmp: llm.embed([PROMPT], use_tqdm=False)[0].outputs.embedding,
    "classify": lambda llm, tmp: llm.classify([PROMPT], use_tqdm=False)[0].outputs.probs,
    "score": lambda llm, tmp: llm.score("a", ["b"], use_tqdm=False)[0].outputs.score,
    "rerank": lambda llm, tmp: llm.rerank("a", ["b", "c"])[0].score,
    "reset_prefix_cache": lambda llm, tmp: llm.reset_prefix_cache(),
    "save_record": lambda llm, tmp: llm.save_record(tmp / "record", model="chat"),
    "trace": traced,
    "sleep": lambda llm, tmp: llm.sleep(1),
    "wake_up": lambda llm, tmp: llm.wake_up(),
    "update_weights": lambda llm, tmp: llm.update_weights(model="chat"),
    "apply_model": lambda llm, tmp: llm.apply_model(lambda model: type(model).__name__),
    "collective_rpc": lambda llm, tmp: llm.collective_rpc(lambda worker: type(worker).__name__),
    "get_metrics": lambda llm, tmp: len(llm.get_metrics()),
    "start_profile": lambda llm, tmp: llm.start_profile(),
    "stop_profile": lambda llm, tmp: llm.stop_profile(),
    "get_default_sampling_params": lambda llm, tmp: llm.get_default_sampling_params().temperature,
    "get_tokenizer": lambda llm, tmp: llm.get_tokenizer().encode("a"),
    "get_world_size": lambda llm, tmp: llm.get_world_size(),
    "core": lambda llm, tmp: llm.core.num_steps >= 0,
    "config": lambda llm, tmp: llm.config.model.name,
    "inputs": lambda llm, tmp: llm.inputs.prepare("x", PROMPT, FOUR)[0].prompt_token_ids,
    "model_config": lambda llm, tmp: llm.model_config.max_model_len,
    "tokenizer": lambda llm, tmp: llm.tokenizer.encode("a"),
    "close": lambda llm, tmp: llm.close(),
}


def call_all(models, tmp, depth):
    """Calls every public method. Returns the results by method."""
    before, found = state(), {}
    profiles = {"profiler": "torch", "torch_profiler_dir": str(tmp)}
    llm = LLM(models=models, depth=depth, profiler_config=profiles, disable_log_stats=False, **SMALL)
    assert not changed(before), "the constructor leaves the thread changed"
    for name, call in CALLS.items():
        found[name] = call(llm, tmp)
        assert not changed(before), f"{name} leaves the thread changed"
    return found


def test_the_table_has_every_public_method():
    extra = {"from_engine_args"}  # the constructor
    assert {name for name in dir(LLM) if not name.startswith("_")} - extra == set(CALLS)


@pytest.mark.every_second("depth", "caller")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caller", CALLERS)
def test_a_call_neither_changes_the_callers_state_nor_depends_on_it(models, tmp_path, caller, depth):
    wanted = call_all(models, tmp_path, depth)
    with CALLERS[caller]():
        assert call_all(models, tmp_path, depth) == wanted


def test_weights_loaded_in_inference_mode_serve_and_change_outside_of_it(models):
    with torch.inference_mode():
        llm = LLM(**models["chat"], **SMALL)
    with llm:
        tokens = generated(llm.generate(PROMPT, FOUR))
        llm.update_weights()
        assert generated(llm.generate(PROMPT, FOUR)) == tokens


@contextmanager
def leaking(num_threads=None):
    """In place of `engine_state`."""
    enter_for_good(num_threads)
    yield


@pytest.mark.parametrize("planted", ["grad", "threads"])
def test_a_leak_is_found(models, tmp_path, monkeypatch, planted):
    step = Lanes.step

    def leaks(self):
        if planted == "grad":
            torch.set_grad_enabled(False)
        else:
            torch.set_num_threads(2)
        return step(self)

    monkeypatch.setattr(Lanes, "step", leaks)
    before = state()
    call_all(models, tmp_path, 0)  # the engine's own thread state hides what a step does
    monkeypatch.setattr("slipstream.device.device.engine_state", leaking)
    try:
        with pytest.raises(AssertionError, match="generate leaves"):
            call_all(models, tmp_path, 0)
    finally:
        torch.set_grad_enabled(True)
        torch.set_num_threads(before["threads"])


@pytest.mark.parametrize("depth", [0, 1])
def test_an_engine_in_an_event_loop_leaves_its_thread_alone(models, depth):
    async def run():
        before = state()
        engine = AsyncEngine(**models["chat"], depth=depth, **SMALL)
        assert not changed(before)
        async for _ in engine.generate(PROMPT, FOUR):
            pass
        assert not changed(before)
        await engine.close()
        assert not changed(before)

    asyncio.run(run())


def test_an_error_gives_the_state_back():
    before = state()
    with pytest.raises(ValueError, match="no"), engine_state(3):
        torch.set_grad_enabled(False)
        raise ValueError("no")
    assert not changed(before)


FORKS = """
import gc, os, sys, torch
from slipstream import LLM, SamplingParams
from slipstream.base.errors import EngineClosed

four = SamplingParams(temperature=0, max_tokens=4)
parallel = lambda: torch.ones(2000, 2000).exp().sum().item()
options = dict(num_threads=3, use_tqdm_on_load=False, max_model_len=64, num_pages=64, page_size=4)
for depth in (0, 1):
    llm = LLM(sys.argv[1], depth=depth, **options)
    ask = lambda: llm.generate([[5, 6, 7]], four, use_tqdm=False)[0].outputs[0].token_ids
    wanted = ask()
    torch.set_num_threads(2)
    total = parallel()
    child = os.fork()
    if not child:
        try:
            assert parallel() == total
            try:
                ask()
            except EngineClosed as error:
                assert "fork" in str(error)
            else:
                raise AssertionError("a fork's call must raise")
            llm.close()
            del llm
            gc.collect()
            sys.stdout.flush()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, depth
    assert parallel() == total and ask() == wanted
    llm.close()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_computes_in_parallel_and_refuses_the_parents_engine(models):
    call = [sys.executable, "-c", FORKS, models["chat"]["model"]]
    ended = subprocess.run(call, env=child_env(), capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stdout + ended.stderr
