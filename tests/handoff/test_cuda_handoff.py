"""Hand-off of pages between two engines on one GPU: tokens of one engine, by CUDA IPC, pinned shared memory and TCP, no
wait."""

from __future__ import annotations

import multiprocessing

import pytest

from slipstream import LLM, SamplingParams
from slipstream.handoff import mover
from tiny import write_tiny

pytestmark = pytest.mark.cuda

PROMPTS = [[i + 3, *range(20 + 10 * i, 90 + 12 * i), i + 5] for i in range(6)]
OPTIONS = dict(
    use_tqdm_on_load=False,
    max_model_len=320,
    page_size=16,
    max_num_seqs=4,
    dtype="float32",
    num_pages=96,
    device="cuda",
)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def raise_os_error(name: str) -> None:
    raise OSError("another host")


@pytest.mark.parametrize("way", ["shared memory", "TCP"])
def test_a_consumer_continues_from_the_pages_of_a_producer(tmp_path, monkeypatch, way):
    folder = str(write_tiny(tmp_path, "qwen3", head_dim=64))
    if way == "TCP":
        monkeypatch.setattr(mover, "MappedMemory", raise_os_error)
    produce = {"kv_role": "kv_producer", "kv_port": 0, "kv_buffer_size": 2**24}
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "error")
    with LLM(folder, **OPTIONS, kv_transfer_config=produce) as producer:
        wanted = [each.outputs[0].token_ids for each in producer.generate(PROMPTS, GREEDY)]
        peer = f"127.0.0.1:{producer.core.handoff.server.port}"
        consume = {"kv_role": "kv_consumer", "kv_peers": [peer], "kv_buffer_size": 2**24}
        with LLM(folder, **OPTIONS, kv_transfer_config=consume) as llm:
            results = llm.generate(PROMPTS, GREEDY)
            assert [each.outputs[0].token_ids for each in results] == wanted
            assert [each.num_cached_tokens for each in results] == [(len(each) - 1) // 16 * 16 for each in PROMPTS]
            assert not llm.core.executor.hot_path.log.found
            llm.core.scheduler.check()


def produce(pipe, folder, options):
    """A prefill engine in a process of its own: CUDA opens no memory of the same process."""
    with LLM(folder, **options) as llm:
        wanted = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)]
        pipe.send((llm.core.handoff.server.port, wanted))
        pipe.recv()


class Producer:
    def __init__(self, folder, options):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=produce, args=(other, folder, options), daemon=True)
        self.process.start()
        other.close()
        port, self.wanted = self.pipe.recv()  # EOFError: it has ended
        self.address = f"127.0.0.1:{port}"


def transfer(**fields):
    return {"kv_buffer_size": 2**24, "kv_connector_extra_config": {"cuda_ipc": True}} | fields


@pytest.mark.parametrize(
    "options",
    [{"depth": 0}, {"depth": 2}, {"kv_cache_dtype": "fp8"}, {"drafts": "ngram:3"}, {"enable_sleep_mode": True}],
    ids=str,
)
def test_pages_pass_from_device_to_device_until_the_producer_is_killed(tmp_path, monkeypatch, options):
    folder = str(write_tiny(tmp_path, "qwen3", head_dim=64))
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "error")
    options = OPTIONS | options
    first = Producer(folder, options | {"kv_transfer_config": transfer(kv_role="kv_producer", kv_port=0)})
    consume = transfer(kv_role="kv_consumer", kv_peers=[first.address])
    with LLM(folder, **options, kv_transfer_config=consume) as llm:
        for _ in range(2):
            results = llm.generate(PROMPTS[:4], GREEDY)
            assert [each.outputs[0].token_ids for each in results] == first.wanted[:4]
            assert [each.num_cached_tokens for each in results] == [(len(each) - 1) // 16 * 16 for each in PROMPTS[:4]]
            (peer,) = llm.core.handoff._mover._peers.values()
            assert peer._mapped[2] is not None
            llm.reset_prefix_cache()
        first.process.kill()
        first.process.join()
        results = llm.generate(PROMPTS, GREEDY)
        assert [each.outputs[0].token_ids for each in results] == first.wanted
        assert not any(each.num_cached_tokens for each in results)
        assert not llm.core.executor.hot_path.log.found
        llm.core.scheduler.check()


def test_engines_of_one_process_use_shared_memory(tmp_path, caplog):
    folder = str(write_tiny(tmp_path, "qwen3", head_dim=64))
    with LLM(folder, **OPTIONS, kv_transfer_config=transfer(kv_role="kv_producer", kv_port=0)) as producer:
        wanted = [each.outputs[0].token_ids for each in producer.generate(PROMPTS, GREEDY)]
        peer = f"127.0.0.1:{producer.core.handoff.server.port}"
        with LLM(folder, **OPTIONS, kv_transfer_config=transfer(kv_role="kv_consumer", kv_peers=[peer])) as llm:
            results = llm.generate(PROMPTS, GREEDY)
            assert [each.outputs[0].token_ids for each in results] == wanted
            assert [each.num_cached_tokens for each in results] == [(len(each) - 1) // 16 * 16 for each in PROMPTS]
    assert "do not pass from device to device" in caplog.text
