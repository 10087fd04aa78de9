"""Sleep, wake_up and exchanged weights: memory is released, tokens are those of the weights of the moment."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore, ProcessGroupGloo

from quantized_checkpoint import quantize
from slipstream import LLM, AsyncLLM, LLMEngine, SamplingParams, received_weights
from slipstream.base.errors import BadCheckpoint, EngineAsleep, InvalidOption, InvalidParams, UnsupportedModel
from tiny import write_tiny

SMALL = dict(max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4, num_threads=1, use_tqdm_on_load=False)
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPT = list(range(5, 22))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one architecture."""
    return [str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama", seed=seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def wanted(folders):
    """Tokens of each checkpoint."""
    found = []
    for folder in folders:
        with LLM(folder, **SMALL) as llm:
            found.append(llm.generate(PROMPT, TEN)[0].outputs[0].token_ids)
    assert found[0] != found[1]
    return found


@pytest.fixture(scope="module")
def llm(folders):
    with LLM(folders[0], enable_sleep_mode=True, **SMALL) as llm:
        yield llm


@pytest.fixture(autouse=True)
def same_start(request):
    """Tests of the shared LLM start and end awake, with the first checkpoint."""
    yield
    if "llm" in request.fixturenames:
        llm, folders = request.getfixturevalue("llm"), request.getfixturevalue("folders")
        llm.wake_up()
        llm.update_weights(folders[0])


def tokens(llm):
    return llm.generate(PROMPT, TEN)[0].outputs[0].token_ids


def addresses(llm):
    runner = llm.core.executor
    return [each.data_ptr() for each in runner.model.parameters()] + [
        keys.data_ptr() for keys, _ in runner.store.caches
    ]


def test_level_1_keeps_weights_and_drops_the_cache(llm, wanted):
    assert tokens(llm) == wanted[0]
    before, pools = addresses(llm), llm.core.executor.device.pools
    assert pools.cache.num_bytes and pools.weights.num_bytes
    llm.core.executor.store.caches[0][0].fill_(1)
    llm.sleep()
    assert llm.llm_engine.is_sleeping() and not pools.cache.is_mapped
    assert not llm.core.executor.store.caches[0][0].any()
    for call in (lambda: llm.generate(PROMPT, TEN), lambda: list(llm.stream(PROMPT, TEN))):
        with pytest.raises(EngineAsleep, match="call wake_up first"):
            call()
    llm.wake_up(tags=["weights"])
    with pytest.raises(EngineAsleep, match="kv_cache"):
        tokens(llm)
    llm.wake_up(tags=["kv_cache"])
    found = llm.generate(PROMPT, TEN)[0]
    assert found.num_cached_tokens == 0 and found.outputs[0].token_ids == wanted[0]
    assert addresses(llm) == before and not llm.llm_engine.is_sleeping()


def test_level_2_needs_weights_before_it_runs_again(llm, wanted, folders):
    before = addresses(llm)
    llm.sleep(level=2)
    assert not any(each.any() for each in llm.core.executor.model.parameters())
    with pytest.raises(EngineAsleep, match="weights are asleep"):
        llm.update_weights(folders[1])
    llm.wake_up()
    with pytest.raises(EngineAsleep, match="tensors were not loaded again; call update_weights"):
        tokens(llm)
    llm.update_weights()
    assert tokens(llm) == wanted[0] and addresses(llm) == before
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.update_weights(folders[1])
    llm.wake_up(tags=["kv_cache"])
    assert tokens(llm) == wanted[1]


def test_requests_in_flight_are_kept_aborted_or_awaited(llm, wanted):
    for mode, reason in (("keep", "length"), ("wait", "length"), ("abort", "abort")):
        stream = llm.stream(PROMPT, TEN)
        first = next(stream)
        llm.sleep(mode=mode)
        if mode == "keep":
            with pytest.raises(EngineAsleep):
                next(stream)  # which ends the stream
            llm.wake_up()
            continue
        llm.wake_up()
        last = ([first, *stream])[-1].outputs[0]
        assert (last.finish_reason, last.token_ids) == (reason, wanted[0][: len(last.token_ids)])
        assert len(last.token_ids) == 10 or mode == "abort"


def test_a_kept_request_continues_after_wake_up(llm, wanted):
    stream = llm.stream(PROMPT, TEN)
    next(stream)
    llm.sleep(mode="keep")
    llm.wake_up()
    for pair in llm.core.executor.store.caches:  # what the pages held is lost, and must not be read
        for cache in pair:
            cache.fill_(float("nan"))
    assert list(stream)[-1].outputs[0].token_ids == wanted[0]


def test_new_weights_apply_to_requests_in_flight_and_reset_the_prefix_cache(llm, wanted, folders):
    assert tokens(llm) == wanted[0] and llm.generate(PROMPT, TEN)[0].num_cached_tokens
    stream = llm.stream(PROMPT, TEN)
    first = next(stream).outputs[0].token_ids
    llm.update_weights(load_file(f"{folders[1]}/model.safetensors"))
    last = list(stream)[-1].outputs[0].token_ids
    num = len(first)
    assert last[:num] == wanted[0][:num]
    rest = llm.generate(PROMPT + first, TEN.with_changes(max_tokens=10 - num, skip_reading_prefix_cache=True))[0]
    assert last[num:] == rest.outputs[0].token_ids
    assert tokens(llm) == wanted[1]


def test_a_part_of_the_tensors_in_another_dtype(llm, folders):
    whole = load_file(f"{folders[1]}/model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    llm.update_weights(iter([(name, whole[name].double())]))
    halves = [each[len(each) // 2 :] for each in llm.core.executor.model.layers[1].parameters() if each.dim() == 2]
    assert any(torch.equal(half, whole[name]) for half in halves)


def test_wrong_weights_change_nothing(llm, wanted, folders, tmp_path):
    whole = load_file(f"{folders[1]}/model.safetensors")
    name = next(iter(whole))
    for wrong, text in (
        ({**whole, "model.nonsense": torch.zeros(1)}, "no tensor model.nonsense"),
        ({**whole, name: torch.zeros(2, 2)}, r"\[2, 2\], and its place in the model is"),
        ({**whole, name: whole[name].long()}, f"{name} is torch.int64; give a floating-point type"),
        (str(write_tiny(tmp_path / "other", "llama", intermediate_size=64)), "do not match the model"),
    ):
        with pytest.raises(BadCheckpoint, match=text):
            llm.update_weights(wrong)
    for wrong in (3, b"x", [1, 2]):
        with pytest.raises((InvalidParams, TypeError)):
            llm.update_weights(wrong)
    assert tokens(llm) == wanted[0]


def test_an_update_that_ends_half_way_must_be_done_again(llm, wanted, folders):
    """The trainer died, or sent a tensor of another shape: no request runs with weights of two versions."""
    whole = load_file(f"{folders[1]}/model.safetensors")
    first, last = next(iter(whole)), list(whole)[-1]

    def lost():
        yield first, whole[first]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        llm.update_weights(lost())
    with pytest.raises(EngineAsleep, match="an update that failed.*, and 1 tensors were not loaded again"):
        tokens(llm)
    llm.update_weights({first: load_file(f"{folders[0]}/model.safetensors")[first]})
    assert tokens(llm) == wanted[0]
    with pytest.raises(BadCheckpoint, match="its place in the model"):
        llm.update_weights(iter([*list(whole.items())[:-1], (last, torch.zeros(2, 2))]))
    with pytest.raises(EngineAsleep, match="call update_weights"):
        tokens(llm)
    llm.update_weights(iter(whole.items()))
    assert tokens(llm) == wanted[1]


def test_weights_from_a_process_group(llm, wanted, folders):
    whole, store = load_file(f"{folders[1]}/model.safetensors"), HashStore()

    def join(rank):
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return ProcessGroupGloo(store, rank, 2, options)

    def train():
        group, options = join(0), torch.distributed.BroadcastOptions()
        for tensor in whole.values():
            group.broadcast([tensor], options).wait()

    trainer = threading.Thread(target=train)
    trainer.start()
    shapes, dtypes = [each.shape for each in whole.values()], [each.dtype for each in whole.values()]
    llm.update_weights(received_weights(join(1), list(whole), shapes, dtypes))
    trainer.join()
    assert tokens(llm) == wanted[1]


def test_an_engine_of_single_steps_reports_what_sleep_aborted(llm):
    engine = llm.llm_engine
    engine.add_request("a", PROMPT, TEN)
    engine.step()
    engine.sleep()
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort" and not engine.has_unfinished_requests()
    engine.wake_up()


def test_wrong_calls_are_refused_by_name(llm, folders):
    with pytest.raises(InvalidParams, match="level is 3"):
        llm.sleep(level=3)
    with pytest.raises(InvalidParams, match="mode is 'later'"):
        llm.sleep(mode="later")
    with pytest.raises(InvalidParams, match="tags are"):
        llm.wake_up(tags=["gpu"])
    llm.sleep(level=0)
    with pytest.raises(EngineAsleep, match="scheduling"):
        tokens(llm)
    llm.wake_up()
    with LLM(folders[0], **SMALL) as plain:
        with pytest.raises(InvalidOption, match="enable_sleep_mode is off"):
            plain.sleep()
        plain.update_weights(folders[1])
        assert plain.llm_engine.is_sleeping() is False


def test_packed_weights_cannot_be_exchanged(default_model):
    options = dict(max_model_len=64, num_pages=64, use_tqdm_on_load=False, num_threads=1)
    with LLM(str(default_model.path), enable_sleep_mode=True, **options) as llm:
        with pytest.raises(UnsupportedModel, match="packed"):
            llm.sleep(level=2)
        llm.sleep(level=1)
        llm.wake_up()
        assert llm.generate("Hello", TEN)[0].outputs[0].token_ids


@pytest.mark.parametrize("method", ["fp8 tensor", "w8a8", "awq"])
def test_tensors_by_name_do_not_replace_quantised_weights(tmp_path, method):
    """A trainer has floats under the name of the numbers, which mean nothing without scales."""
    folder = write_tiny(tmp_path, "llama", intermediate_size=128)
    floats = {name: tensor * 2 for name, tensor in load_file(folder / "model.safetensors").items()}
    quantize(folder, method)
    with LLM(str(folder), **SMALL) as llm:
        before = tokens(llm)
        for given in (floats, iter(floats.items())):
            with pytest.raises(UnsupportedModel, match="the checkpoint is quantised by .*; give a folder"):
                llm.update_weights(given)
        llm.update_weights(str(folder))
        assert tokens(llm) == before


def test_tensors_by_name_are_quantised_at_load(folders):
    options = dict(SMALL, quantization="fp8")
    with LLM(folders[0], **options) as llm, LLM(folders[1], **options) as other:
        llm.update_weights(load_file(f"{folders[1]}/model.safetensors"))
        assert tokens(llm) == tokens(other)


def test_an_asynchronous_engine_sleeps_and_loads_weights(folders, wanted):
    async def run():
        engine = AsyncLLM(folders[0], enable_sleep_mode=True, **SMALL)
        try:

            async def last(name):
                found = [output async for output in engine.generate(PROMPT, TEN, name)]
                return found[-1].outputs[0]

            assert (await last("a")).token_ids == wanted[0]
            running = engine.generate(PROMPT, TEN, "kept")
            first = await anext(running)  # perhaps the last one
            await engine.sleep(level=2, mode="keep")
            assert await engine.is_sleeping()
            with pytest.raises(EngineAsleep):
                await last("b")
            await engine.wake_up()
            await engine.update_weights()
            kept = [first, *[output async for output in running]]
            assert kept[-1].outputs[0].token_ids == wanted[0]
            await engine.update_weights(folders[1])
            assert (await last("c")).token_ids == wanted[1] and not await engine.is_sleeping()
        finally:
            await engine.close()

    asyncio.run(run())


@pytest.mark.cuda
def test_graphs_on_a_gpu_stay_valid(folders):
    # float32: in bfloat16 the two likeliest tokens after the first are one step apart, and a prompt that is computed
    # again as prefill instead of decode may draw the other one
    options = {**SMALL, "num_threads": None, "device": "cuda", "dtype": "float32", "enable_sleep_mode": True}
    with LLM(folders[0], **options) as llm, LLM(folders[1], **options) as other:
        wanted, changed = tokens(llm), tokens(other)
        captured, before = llm.core.executor.graphs.num_captured, addresses(llm)
        assert captured
        free = torch.cuda.mem_get_info()[0]
        llm.sleep(level=1)
        assert torch.cuda.mem_get_info()[0] > free
        llm.wake_up()
        assert tokens(llm) == wanted and addresses(llm) == before
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(folders[1])
        assert tokens(llm) == changed and llm.core.executor.graphs.num_captured == captured
        llm.update_weights({k: v.cuda() for k, v in load_file(f"{folders[0]}/model.safetensors").items()})
        assert tokens(llm) == wanted
        engine = LLMEngine(llm)
        engine.add_request("a", PROMPT, TEN)
        engine.step()
        engine.sleep(mode="keep")
        engine.wake_up()
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert outputs[-1].outputs[0].token_ids == wanted
