"""Hand-off of pages between two engines on one GPU: tokens of one engine, pinned shared memory and TCP, no wait."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.engine import page_peer
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
        monkeypatch.setattr(page_peer, "MappedMemory", raise_os_error)
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
