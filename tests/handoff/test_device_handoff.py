"""Hand-off of pages from device to device: the tokens of one engine, whatever happens to the copies.

Two engines on devices of the CPU whose memory other processes can open (`tests/support/peer_device.py`); CUDA's own
memory is in `test_cuda_handoff.py`.
"""

from __future__ import annotations

import threading
import time
import weakref

import numpy as np
import pytest
from test_handoff import GREEDY, PREFILL, PROMPTS, tokens
from test_handoff import make as make_engine

from patience import PATIENCE
from peer_device import LatePeerDevice, PeerDevice
from rank_threads import run_ranks_as_threads
from slipstream.base.errors import InvalidOption
from slipstream.config.config import read_transfer_config
from slipstream.config.options import make_options
from slipstream.contracts.messages import Abort, Submit
from slipstream.contracts.step import TierPlan
from slipstream.engine import build
from slipstream.engine.build import estimate_build
from slipstream.handoff import server
from slipstream.runner import build as runner_build
from tiny import write_tiny

PAGES = 9  # of a prompt


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    """On CPUs the option is refused: see the last test."""
    monkeypatch.setattr(build, "check_tier", lambda config, num_replicas: None)


def make(folder, role, device, **options):
    options = {"kv_connector_extra_config": {"cuda_ipc": True}, "depth": device.depth, **options}
    return make_engine(folder, role, _device=device, **options)


def produce(folder, prompts=PROMPTS, **options):
    llm = make(folder, "kv_producer", PeerDevice(1, 1), kv_port=0, **options)
    llm.generate(prompts, PREFILL)
    return llm


def address_of(llm) -> str:
    return f"127.0.0.1:{llm.core.handoff.server.port}"


def wait_until(is_true) -> None:
    limit = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def wanted(folder):
    with make_engine(folder, None) as llm:
        return tokens(llm.generate(PROMPTS, GREEDY))


@pytest.fixture
def producer(folder):
    with produce(folder) as llm:
        yield llm


def page_bytes(llm) -> int:
    return sum(group.bytes_per_page for group in llm.core.config.cache.groups)


@pytest.mark.parametrize("make_device", [lambda: PeerDevice(0, 1), lambda: PeerDevice(2, 1), lambda: LatePeerDevice(2)])
def test_a_consumer_continues_from_the_pages_of_a_producer(folder, wanted, producer, make_device):
    device = make_device()
    with make(folder, "kv_consumer", device, kv_peers=[address_of(producer)]) as llm:
        results = llm.generate(PROMPTS, GREEDY)
        assert tokens(results) == wanted
        assert [result.num_cached_tokens for result in results] == [36] * 4
        assert device.num_received == 4 * PAGES * page_bytes(llm)
        assert not producer.core.scheduler.cache.tier._slots[0].pins
        others = [[token + 5 for token in prompt] for prompt in PROMPTS]
        llm.generate(others * 2, GREEDY)  # takes all pages, so that those of PROMPTS come back from the slots
        assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted
        assert llm.core.scheduler.cache.tier.bytes_loaded > 4 * PAGES * page_bytes(llm)
        assert device.num_received == 4 * PAGES * page_bytes(llm)
        llm.core.scheduler.check()


def test_an_engine_frees_the_memory_when_it_is_closed(folder, producer):
    """Not a garbage collection in a step of another engine."""
    with make(folder, "kv_consumer", PeerDevice(1, 1), kv_peers=[address_of(producer)]) as llm:
        llm.generate(PROMPTS, GREEDY)
        (peer,) = llm.core.handoff._mover._peers.values()
        mirror, of_peer = llm.core.tier.mirror, weakref.ref(peer._mapped[2])
        opened = peer._mapped[2]._memory
        assert not mirror._exported.is_closed
    assert mirror._exported.is_closed and of_peer() is None
    with pytest.raises(OSError, match="the engine has ended"):
        mirror.copy_from(opened, 0, [(0, 0)])


def test_few_slots_are_reused_while_streams_are_late(folder, producer):
    """Stores, loads and copies from the producer follow each other in the same slots."""
    prompts = [prompt[:25] + [first] * 12 for first in (3, 9) for prompt in PROMPTS] + PROMPTS
    with make_engine(folder, None) as llm:
        alone = tokens(llm.generate(prompts, GREEDY))
    options = dict(kv_peers=[address_of(producer)], kv_buffer_size=2**17, num_pages=32)
    with make(folder, "kv_consumer", LatePeerDevice(2, longest=0.004), **options) as llm:
        for _ in range(2):
            assert tokens(llm.generate(prompts, GREEDY)) == alone
        tier = llm.core.scheduler.cache.tier
        assert llm.core.scheduler.cache.imports.num_arrived and tier.bytes_loaded and tier.bytes_stored
        llm.core.scheduler.check()


def test_a_slot_is_not_free_while_its_content_is_still_loaded(folder, wanted):
    device = LatePeerDevice(2)
    with make(folder, "kv_producer", device, kv_port=0) as llm:
        llm.generate(PROMPTS[:1], PREFILL)
        gate, tier = threading.Event(), llm.core.tier
        wait_until(lambda: tier.mirror.is_written(0, 0, 1))
        device.compute.run(gate.wait)  # the step before
        tier.copy(TierPlan(np.zeros((0, 3), np.int32), np.array([[0, 0, 1]], np.int32)))  # slot 0 to page 1
        is_free = tier.mark()
        try:
            wait_until(is_free.of_tier.done)
            assert not is_free.done()
        finally:
            gate.set()
        wait_until(is_free.done)


@pytest.mark.parametrize("by_device", [True, False])
def test_a_producer_whose_streams_are_late_sends_what_is_written(folder, wanted, by_device):
    with make(folder, "kv_producer", LatePeerDevice(2, longest=0.03), kv_port=0) as llm:
        peers = {"kv_peers": [address_of(llm)]}
        with (
            make(folder, "kv_consumer", PeerDevice(1, 1), **peers)
            if by_device
            else make_engine(folder, "kv_consumer", **peers) as consumer
        ):
            for prompt, expected in zip(PROMPTS, wanted, strict=True):
                llm.generate([prompt], PREFILL)  # returns before its pages are stored
                (result,) = consumer.generate([prompt], GREEDY)
                assert result.outputs[0].token_ids == expected
            assert consumer.core.scheduler.cache.imports.num_arrived


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"drafts": "ngram:3"}], ids=str)
def test_scales_of_an_fp8_cache_and_tokens_for_drafts_travel_too(folder, options):
    prompts = [prompt[:13] * 3 for prompt in PROMPTS]
    with produce(folder, prompts, **options) as producer:
        expected = tokens(producer.generate(prompts, GREEDY))
        device = PeerDevice(1, 1)
        with make(folder, "kv_consumer", device, kv_peers=[address_of(producer)], **options) as llm:
            if "drafts" in options:
                llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
            results = llm.generate(prompts, GREEDY)
            assert tokens(results) == expected and [each.num_cached_tokens for each in results] == [36] * 4
            assert device.num_received
            if "drafts" in options:
                assert llm.core.scheduler.drafts.counts.num_drafts


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])  # the second one has no pages
def test_checkpoints_of_recurrent_states_travel_too(tmp_path, family):
    folder = write_tiny(tmp_path, family)
    prompts = [[first + n % 11 for n in range(150)] for first in (20, 70)]
    options = dict(max_model_len=200, num_pages=200, num_checkpoints=8)
    with produce(folder, prompts, **options) as producer:
        expected = tokens(producer.generate(prompts, GREEDY))
        device = PeerDevice(1, 1)
        with make(folder, "kv_consumer", device, kv_peers=[address_of(producer)], **options) as llm:
            results = llm.generate(prompts, GREEDY)
            assert tokens(results) == expected and [each.num_cached_tokens for each in results] == [128, 128]
            assert device.num_received


def test_slots_are_not_overwritten_while_they_are_copied(folder, wanted):
    """The producer has room for other prompts only where nothing is pinned."""
    device, few = PeerDevice(1, 1), 2**18
    with (
        produce(folder, PROMPTS[:1], kv_buffer_size=few) as producer,
        make(folder, "kv_consumer", device, kv_peers=[address_of(producer)]) as llm,
    ):
        slots = producer.core.scheduler.cache.tier._slots[0]
        device.gate.clear()
        llm.core.submit(Submit("a", PROMPTS[0], GREEDY, 0.0))
        wait_until(lambda: llm.core.step() == [] and len(slots.pins) == PAGES and device.peers)
        num_slots = few // page_bytes(llm)
        for seed in range(num_slots // PAGES + 2):  # every slot that can be taken gets another page
            producer.generate([[(token * 7 + seed) % 250 + 3 for token in PROMPTS[0]]], PREFILL)
        assert len(slots.pins) == PAGES and sum(slots.num_stores) >= num_slots
        device.gate.set()
        found: list[int] = []
        wait_until(lambda: found.extend(t for each in llm.core.step() for t in each.token_ids) or len(found) == 12)
        assert found == wanted[0] and llm.core.scheduler.cache.imports.num_arrived == PAGES
        wait_until(lambda: not slots.pins)


def test_pages_whose_lease_ended_before_they_were_copied_are_computed(folder, wanted, producer, monkeypatch):
    """The slots have other pages when the copies run: nothing of them is used."""
    receive, is_over = server.receive, threading.Event()

    def receive_until_over(connection, size, deadline):
        assert is_over.wait(PATIENCE)
        return receive(connection, size, 0.0)  # the time limit of the lease has passed

    monkeypatch.setattr(server, "receive", receive_until_over)
    device = PeerDevice(1, 1)
    with make(folder, "kv_consumer", device, kv_peers=[address_of(producer)]) as llm:
        slots = producer.core.scheduler.cache.tier._slots[0]
        device.gate.clear()
        llm.core.submit(Submit("a", PROMPTS[0], GREEDY, 0.0))
        wait_until(lambda: llm.core.step() == [] and len(slots.pins) == PAGES and device.peers)
        is_over.set()
        wait_until(lambda: not slots.pins)
        memory = producer.core.tier.mirror._exported.tensor
        memory.fill_(0x55)  # in the place of other pages
        assert llm.core.scheduler.cache.imports.is_waiting  # slots stay reserved until the copies end
        device.gate.set()
        found: list[int] = []
        wait_until(lambda: found.extend(t for each in llm.core.step() for t in each.token_ids) or len(found) == 12)
        assert found == wanted[0]
        assert llm.core.scheduler.cache.imports.num_arrived == 0 and device.num_received
        llm.core.scheduler.check()


def test_a_producer_that_dies_during_the_copies(folder, wanted):
    device = PeerDevice(1, 1)
    with produce(folder) as producer, make(folder, "kv_consumer", device, kv_peers=[address_of(producer)]) as llm:
        device.gate.clear()
        llm.core.submit(Submit("a", PROMPTS[0], GREEDY, 0.0))
        wait_until(lambda: llm.core.step() == [] and device.peers)
        producer.core.handoff.server.close()
        device.gate.set()
        found: list[int] = []
        wait_until(lambda: found.extend(t for each in llm.core.step() for t in each.token_ids) or len(found) == 12)
        assert found == wanted[0] and llm.core.scheduler.cache.imports.num_arrived == 0


def test_an_aborted_request_keeps_its_slots_until_the_copies_end(folder, wanted, producer):
    device = PeerDevice(1, 1)
    with make(folder, "kv_consumer", device, kv_peers=[address_of(producer)]) as llm:
        core, imports = llm.core, llm.core.scheduler.cache.imports
        device.gate.clear()
        core.submit(Submit("a", PROMPTS[0], GREEDY, 0.0))
        wait_until(lambda: core.step() == [] and device.peers)
        core.abort(Abort("a"))
        assert len(core.scheduler.cache.tier._slots[0]._reserved) == PAGES
        device.gate.set()
        wait_until(lambda: not imports.is_waiting or imports.take_done())
        core.scheduler.check()
        assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted


def test_other_consumers_get_the_same_pages_from_host_memory(folder, wanted, producer):
    """One without the option; and one whose device cannot open the memory."""
    with make_engine(folder, "kv_consumer", kv_peers=[address_of(producer)]) as llm:
        results = llm.generate(PROMPTS, GREEDY)
        assert tokens(results) == wanted and [each.num_cached_tokens for each in results] == [36] * 4
    device = PeerDevice(1, 1)
    device.open_memory = refuse
    with make(folder, "kv_consumer", device, kv_peers=[address_of(producer)]) as llm:
        results = llm.generate(PROMPTS, GREEDY)  # to the host's slots, and from there through the device's
        assert tokens(results) == wanted and [each.num_cached_tokens for each in results] == [36] * 4


def refuse(handle: bytes) -> None:
    raise OSError("the devices cannot reach each other")


def test_an_engine_passes_on_what_it_got_from_a_device_to_devices_only(folder, wanted, producer):
    with make(folder, "kv_both", PeerDevice(1, 1), kv_port=0, kv_peers=[address_of(producer)]) as middle:
        assert tokens(middle.generate(PROMPTS, GREEDY)) == wanted
        last = PeerDevice(1, 1)
        with make(folder, "kv_consumer", last, kv_peers=[address_of(middle)]) as llm:
            results = llm.generate(PROMPTS, GREEDY)
            assert tokens(results) == wanted and [each.num_cached_tokens for each in results] == [36] * 4
            assert last.num_received
        with make_engine(folder, "kv_consumer", kv_peers=[address_of(middle)]) as llm:
            results = llm.generate(PROMPTS, GREEDY)
            assert tokens(results) == wanted and [each.num_cached_tokens for each in results] == [0] * 4


def test_on_cpus_it_is_refused_by_name(folder, monkeypatch):
    monkeypatch.undo()
    transfer = {"kv_role": "kv_producer", "kv_connector_extra_config": {"cuda_ipc": True}}
    with pytest.raises(InvalidOption, match="cuda_ipc is for engines on GPUs"):
        estimate_build(make_options(model=str(folder), device="cpu", kv_transfer_config=transfer))
    assert not read_transfer_config(transfer | {"kv_connector_extra_config": {"cuda_ipc": False}}).cuda_ipc
    for wrong in ({"cuda_ipc": 1}, {"other": True}, [True]):
        with pytest.raises(InvalidOption, match='it may be {"cuda_ipc": true}'):
            read_transfer_config(transfer | {"kv_connector_extra_config": wrong})


def test_every_rank_copies_its_part_from_the_device_of_the_same_rank(folder, wanted, monkeypatch):
    devices: list[PeerDevice] = []

    def open_device(kind, depth, num_threads):
        devices.append(PeerDevice(depth, num_threads))
        return devices[-1]

    run_ranks_as_threads(monkeypatch)
    monkeypatch.setattr(runner_build, "open_device", open_device)  # of the other ranks
    with produce(folder, tensor_parallel_size=2) as producer:
        device = PeerDevice(1, 1)
        options = dict(kv_peers=[address_of(producer)], tensor_parallel_size=2)
        with make(folder, "kv_consumer", device, **options) as llm:
            results = llm.generate(PROMPTS, GREEDY)
            assert tokens(results) == wanted and [each.num_cached_tokens for each in results] == [36] * 4
            assert device.num_received == devices[-1].num_received == 4 * PAGES * page_bytes(llm)
            assert len(devices) == 2 and not devices[0].num_received
