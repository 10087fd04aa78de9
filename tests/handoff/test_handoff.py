"""Hand-off of KV cache pages between engines: the tokens of one engine, whatever happens to the transfer."""

from __future__ import annotations

import mmap
import os
import socket

import pytest

from patience import PATIENCE
from slipstream import LLM, SamplingParams
from slipstream.base.errors import InvalidOption
from slipstream.config.options import make_options
from slipstream.contracts.messages import Abort, Submit
from slipstream.engine.build import estimate_build
from slipstream.handoff import mover, server
from slipstream.handoff.server import PageServer
from slipstream.handoff.shared_pages import MappedMemory
from slipstream.scheduler.cache.imports import PageImports
from tiny import write_tiny

PROMPTS = [list(range(first, first + 37)) for first in (20, 70, 120, 170)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PREFILL = SamplingParams(temperature=0, max_tokens=1)


def make(folder, role: str | None, **options) -> LLM:
    transfer = None
    if role is not None:
        transfer = {"kv_role": role, "kv_buffer_size": 2**22, "kv_timeout": PATIENCE}
        transfer |= {
            name: options.pop(name) for name in list(options) if name.startswith("kv_") and "cache" not in name
        }
    options = {"num_pages": 60, "dtype": "float64", "max_model_len": 72} | options
    return LLM(
        str(folder),
        use_tqdm_on_load=False,
        max_num_seqs=4,
        page_size=4,
        num_threads=1,
        kv_transfer_config=transfer,
        **options,
    )


def raise_os_error(name: str) -> None:
    raise OSError("another host")


def tokens(results) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def wanted(folder):
    with make(folder, None) as llm:
        return tokens(llm.generate(PROMPTS, GREEDY))


@pytest.fixture(scope="module")
def producer(folder):
    with make(folder, "kv_producer", kv_port=0) as llm:
        llm.generate(PROMPTS, PREFILL)
        yield llm


@pytest.fixture
def peer(producer) -> str:
    return f"127.0.0.1:{producer.core.handoff.server.port}"


@pytest.mark.parametrize(("depth", "way"), [(0, "shared memory"), (2, "shared memory"), (2, "TCP")])
def test_a_consumer_continues_from_the_pages_of_a_producer(folder, wanted, peer, depth, way, monkeypatch):
    received = []
    if way == "TCP":
        monkeypatch.setattr(mover, "MappedMemory", raise_os_error)
    right = mover.receive_into
    monkeypatch.setattr(mover, "receive_into", lambda *args: received.append(right(*args)))
    with make(folder, "kv_consumer", kv_peers=[peer], depth=depth) as llm:
        results = llm.generate(PROMPTS, GREEDY)
        assert tokens(results) == wanted
        assert [result.num_cached_tokens for result in results] == [36] * 4
        imports = llm.core.scheduler.cache.imports
        assert imports.num_arrived == imports.num_asked == 36
        assert len(received) == (36 if way == "TCP" else 0)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted  # from its own cache: no page is asked for again
        assert imports.num_asked == 36
        llm.core.scheduler.check()


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"drafts": "ngram:3"}], ids=str)
def test_scales_of_an_fp8_cache_and_tokens_for_drafts_travel_with_the_pages(folder, options):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    prompts = [prompt[:13] * 3 for prompt in PROMPTS]  # repeated, so that there are drafts
    with make(folder, "kv_producer", kv_port=0, **options) as producer:
        wanted = producer.generate(prompts, params)
        peer = f"127.0.0.1:{producer.core.handoff.server.port}"
        with make(folder, "kv_consumer", kv_peers=[peer], **options) as llm:
            if "drafts" in options:
                llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
            results = llm.generate(prompts, params)
            assert [result.num_cached_tokens for result in results] == [36] * 4
            assert tokens(results) == tokens(wanted)
            for result, own in zip(results, wanted, strict=True):
                for found, given in zip(result.outputs[0].logprobs, own.outputs[0].logprobs, strict=True):
                    assert {name: each.logprob for name, each in found.items()} == pytest.approx(
                        {name: each.logprob for name, each in given.items()}, abs=1e-9
                    )
            if "drafts" in options:
                assert llm.core.scheduler.drafts.counts.num_drafts
            llm.core.scheduler.check()


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])  # the second one has no pages
def test_checkpoints_of_recurrent_states_travel_with_the_pages(tmp_path, monkeypatch, family):
    folder = write_tiny(tmp_path, family)
    prompts = [[first + n % 11 for n in range(150)] for first in (20, 70)]
    options = dict(max_model_len=200, num_pages=200, num_checkpoints=8)
    with make(folder, "kv_producer", kv_port=0, **options) as producer:
        wanted = tokens(producer.generate(prompts, GREEDY))
        peer = f"127.0.0.1:{producer.core.handoff.server.port}"
        with make(folder, "kv_consumer", kv_peers=[peer], **options) as llm:
            results = llm.generate(prompts, GREEDY)
            assert tokens(results) == wanted and [result.num_cached_tokens for result in results] == [128, 128]
            llm.core.scheduler.check()
            llm.reset_prefix_cache()
            right, size = server.checksum, llm.core.config.cache.states.checkpoint_bytes
            is_state = lambda content: len(content) == size  # noqa: E731
            monkeypatch.setattr(server, "checksum", lambda name, each: right(name, each) ^ is_state(each))
            results = llm.generate(prompts, GREEDY)  # states arrive damaged: computed
            assert tokens(results) == wanted and [result.num_cached_tokens for result in results] == [0, 0]


def test_prompts_that_no_peer_has_are_computed(folder, peer):
    others = [[token + 5 for token in prompt] for prompt in PROMPTS[:2]]
    with make(folder, None) as llm:
        alone = tokens(llm.generate(others, GREEDY))
    with make(folder, "kv_consumer", kv_peers=[peer]) as llm:
        results = llm.generate(others, GREEDY)
        assert tokens(results) == alone and [result.num_cached_tokens for result in results] == [0, 0]


def test_a_transfer_that_breaks_off_is_computed(folder, wanted, peer, monkeypatch):
    right, sent = PageServer.send, []

    def break_off(producer, connection, page, deadline, transport):
        sent.append(page)
        if len(sent) == 4:
            connection.sendall(b"\x00\x01")  # a part of a header
            raise ConnectionError
        right(producer, connection, page, deadline, transport=transport)

    monkeypatch.setattr(PageServer, "send", break_off)
    with make(folder, "kv_consumer", kv_peers=[peer]) as llm:
        (first,) = llm.generate(PROMPTS[:1], GREEDY)
        assert first.outputs[0].token_ids == wanted[0] and first.num_cached_tokens == 12  # three pages arrived
        assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted


def test_a_page_with_a_wrong_checksum_is_computed(folder, wanted, peer, monkeypatch):
    right, num = server.checksum, [0]

    def wrong(page_hash, content):
        num[0] += 1
        return right(page_hash, content) ^ (num[0] % 9 == 3)  # the third page of each prompt

    monkeypatch.setattr(server, "checksum", wrong)
    with make(folder, "kv_consumer", kv_peers=[peer]) as llm:
        results = llm.generate(PROMPTS[:1], GREEDY)
        assert tokens(results) == wanted[:1] and results[0].num_cached_tokens == 8


def test_a_late_peer_is_not_waited_for(folder, wanted):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        peer = f"127.0.0.1:{silent.getsockname()[1]}"
        with make(folder, "kv_consumer", kv_peers=[peer], kv_timeout=0.05) as llm:
            results = llm.generate(PROMPTS, GREEDY)
            assert tokens(results) == wanted and not any(result.num_cached_tokens for result in results)


def test_a_peer_that_is_not_there_is_left_out(folder, wanted, peer):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = f"127.0.0.1:{listener.getsockname()[1]}"
    with make(folder, "kv_consumer", kv_peers=[gone, peer]) as llm:
        results = llm.generate(PROMPTS, GREEDY)
        assert tokens(results) == wanted and all(result.num_cached_tokens == 36 for result in results)


def test_pages_of_another_model_are_refused(tmp_path, peer):
    with make(write_tiny(tmp_path, "llama", seed=7), "kv_consumer", kv_peers=[peer]) as llm:
        (result,) = llm.generate(PROMPTS[:1], GREEDY)
        assert result.num_cached_tokens == 0 and llm.core.scheduler.cache.imports.num_arrived == 0


def test_an_aborted_request_leaves_no_slot_behind(folder, peer, monkeypatch):
    with make(folder, "kv_consumer", kv_peers=[peer]) as llm:
        core = llm.core
        monkeypatch.setattr(PageImports, "take_done", lambda imports: [])
        engine = llm.core.scheduler
        core.submit(Submit("a", PROMPTS[0], GREEDY, 0.0))
        assert core.step() == [] and engine.num_waiting == 1
        core.abort(Abort("a"))
        monkeypatch.undo()
        while engine.cache.imports.is_waiting:
            engine.cache.imports.take_done()
        engine.check()
        assert engine.cache.tier.reserve([bytes([n]) * 16 for n in range(4)])


def test_all_samples_of_a_prompt_continue_from_its_pages(folder, peer):
    params = SamplingParams(temperature=1, seed=3, max_tokens=6, ignore_eos=True, n=3)
    with make(folder, None) as llm:
        wanted = [sample.token_ids for sample in llm.generate(PROMPTS[0], params)[0].outputs]
    with make(folder, "kv_consumer", kv_peers=[peer]) as llm:
        core = llm.core
        core.submit(Submit("a", PROMPTS[0], params, 0.0))
        found: dict[int, list[int]] = {sample: [] for sample in range(3)}
        num_steps = 0
        while num_steps < 20:  # with the pages; a sample that nothing wakes would wait forever
            num_steps += not core.scheduler.cache.imports.is_waiting
            for output in core.step():
                found[output.sample] += output.token_ids
        core.scheduler.check()
        assert list(found.values()) == wanted and not core.scheduler.num_waiting


def test_a_producer_that_was_started_again_is_asked_again(folder, wanted):
    with make(folder, "kv_producer", kv_port=0) as llm:
        llm.generate(PROMPTS[:1], PREFILL)
        port = llm.core.handoff.server.port
        consumer = make(folder, "kv_consumer", kv_peers=[f"127.0.0.1:{port}"])
        consumer.generate(PROMPTS[:1], GREEDY)
    with consumer, make(folder, "kv_producer", kv_port=port) as llm:
        llm.generate(PROMPTS[1:2], PREFILL)
        (result,) = consumer.generate(PROMPTS[1:2], GREEDY)
        assert result.outputs[0].token_ids == wanted[1] and result.num_cached_tokens == 36


def test_replicas_cannot_serve_pages_at_one_port(folder):
    with pytest.raises(InvalidOption, match="2 replicas"):
        estimate_build(make_options(model=str(folder), device="cpu", role="prefill", data_parallel_size=2))


def test_shared_memory_can_be_read_by_processes_of_the_same_user_only(producer, monkeypatch):
    name = producer.core.handoff.server._shared.name
    mapped = MappedMemory(name)
    assert mapped.page(0, 0) == producer.core.tier.memory_of(0, 0)
    with pytest.raises(TypeError, match="read-only"):
        mapped.page(0, 0)[0] = 1
    with pytest.raises(PermissionError):  # not even where a process maps the file itself
        mmap.mmap(producer.core.tier.shared_files()[0][0], 0)
    with pytest.raises(ConnectionError, match="group 9 is not"):
        mapped.page(9, 0)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(ConnectionError, match="not shared"):
        MappedMemory(name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_role": "producer"}, "kv_producer, kv_consumer, kv_both"),
        ({"kv_role": "kv_producer", "kv_connector": "NixlConnector"}, "remove it"),
        ({"kv_role": "kv_consumer", "kv_peers": ["here"]}, "host:port"),
        ({"kv_role": "kv_producer", "kv_rank": 0}, "no field 'kv_rank'"),
        ("{", "not JSON"),
    ],
)
def test_wrong_settings_are_named(folder, config, message):
    with pytest.raises(InvalidOption, match=message):
        LLM(str(folder), use_tqdm_on_load=False, kv_transfer_config=config)
