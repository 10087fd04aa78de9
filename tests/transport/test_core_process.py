"""The core process: the same results as in one process, clear failures, and no orphan processes."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from child import child_env, is_alive
from patience import PATIENCE
from serve.server_process import SCRIPTED
from slipstream import LLM, SamplingParams
from slipstream.base.errors import EngineDead, InvalidOption, ModelNotFound, QueueFull, SlipstreamError
from slipstream.config.options import Options, make_options
from slipstream.contracts.messages import Submit
from slipstream.front.async_engine import AsyncEngine
from slipstream.front.router import RequestRouter
from slipstream.transport import core_process
from slipstream.transport.frames import Pulse, Ready
from slipstream.transport.replica_start import CoreStart, spawn_core
from slipstream.transport.sockets import SocketClient
from tiny import write_tiny

SMALL = dict(max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4, num_threads=1)
PARAMS = SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True)
LONG = PARAMS.with_changes(max_tokens=50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture
def scripted(monkeypatch):
    """Cores without a model, see tests/scripted_server."""
    monkeypatch.setenv("PYTHONPATH", child_env(SCRIPTED)["PYTHONPATH"])


def with_core(scenario, *options, front_ends=1):
    """Runs a scenario on engines over one core process, which must end in order when they are closed."""

    async def main():
        core, socks = spawn_core([make_options(**(SMALL | each)) for each in options], front_ends)
        engines = [AsyncEngine(client=await SocketClient.connect(sock)) for sock in socks]
        try:
            for engine in engines:
                await asyncio.wait_for(engine.until_ready(), PATIENCE)
            return await asyncio.wait_for(scenario(core, *engines), PATIENCE)
        finally:
            for engine in engines:
                await engine.close()
            ended = core.wait(PATIENCE)
            main.ended = ended

    result = asyncio.run(main())
    assert main.ended is None, main.ended  # it checks its own pages and rows as it ends
    return result


async def last(stream):
    async for result in stream:
        final = result
    return final


def test_two_front_ends_get_what_the_script_api_gives(folder):
    prompts = [[i, i + 1, i + 2] for i in range(1, 9)]

    async def scenario(core, one, two):
        streams = [last((one, two)[i % 2].generate(prompt, PARAMS)) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*streams)
        text = [new.text async for (new,) in one.increments(prompts[0], PARAMS)]
        return [(r.outputs[0].token_ids, r.outputs[0].text) for r in results], "".join(text)

    got, streamed = with_core(scenario, {"model": folder}, front_ends=2)
    with LLM(folder, use_tqdm_on_load=False, **SMALL) as llm:
        wanted = [(r.outputs[0].token_ids, r.outputs[0].text) for r in llm.generate(prompts, PARAMS)]
    assert got == wanted and streamed == wanted[0][1]


def test_statistics_come_before_the_core_is_ready(folder, scripted, monkeypatch):
    """So that /metrics of a server that is ready has all names."""
    kinds, handle = [], RequestRouter._handle

    def note(router, message):
        kinds.append(type(message))
        handle(router, message)

    monkeypatch.setattr(RequestRouter, "_handle", note)
    with_core(lambda core, engine: engine.abort_all(), {"model": folder})
    assert kinds.index(Pulse) < kinds.index(Ready)


def test_requests_choose_models_by_name(folder, tmp_path):
    other = str(write_tiny(tmp_path, "qwen3"))

    async def scenario(core, engine):
        assert list(engine.models) == ["one", "two"]
        results = [(await last(engine.generate([1, 2, 3], PARAMS, model=m))).outputs[0] for m in (None, "one", "two")]
        with pytest.raises(ModelNotFound):
            await last(engine.generate([1], PARAMS, model="three"))
        return [result.token_ids for result in results]

    default, one, two = with_core(
        scenario, {"model": folder, "served_model_name": "one"}, {"model": other, "served_model_name": "two"}
    )
    assert default == one != two


def test_refusals_aborts_and_disconnects_do_not_affect_others(folder, scripted):
    async def scenario(core, one, two):
        steady = asyncio.create_task(last(one.generate([5, 6], LONG)))
        left = [asyncio.create_task(last(two.generate([i, 2], LONG))) for i in range(1, 4)]
        while two.load.num_queued:
            await asyncio.sleep(0.01)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        crowd = [asyncio.create_task(last(two.generate([i, 3], LONG))) for i in range(1, 12)]
        ends = await asyncio.gather(*crowd, return_exceptions=True)
        refused = [end for end in ends if isinstance(end, QueueFull)]
        assert refused and len(refused) < len(ends)
        async for _ in two.generate([9], LONG):
            break
        await two.close()  # with a request under way
        assert (await steady).finished
        assert (await last(one.generate([7], PARAMS))).finished
        return one.pulse

    pulse = with_core(scenario, {"model": folder, "max_waiting": 4}, front_ends=2)
    assert sum(lane.num_steps for lane in pulse.lanes) > 0


def test_prompts_of_one_reader_begin_together_or_not_at_all(folder, scripted):
    async def scenario(core, engine):
        def submits():
            return [engine.inputs.prepare(engine.new_id(), [1, 2, 3], PARAMS) for _ in range(3)]

        with engine.read(submits()) as first, engine.read(submits()) as second:
            with pytest.raises(QueueFull, match="^4 requests are waiting"):
                await second.wait()
            assert len(await first.wait()) == 3
        with engine.read(submits()) as third:
            return [track.finished for track in await third.wait()]

    assert with_core(scenario, {"model": folder, "max_waiting": 4}) == [True] * 3


def test_a_front_end_exits_while_its_core_does_not_read(folder):
    """As a server must whose GPU hangs."""

    async def scenario():
        ours, theirs = socket.socketpair()
        client = await SocketClient.connect(ours)
        for _ in range(100):
            client.send(Submit("a", [1] * 10_000, PARAMS, 0.0))
        await asyncio.sleep(0)  # until it is written, as far as it goes
        await asyncio.wait_for(client.close(), PATIENCE)
        theirs.close()

    asyncio.run(scenario())


def failed_start(*options):
    async def main():
        core, (sock,) = spawn_core([make_options(**each) for each in options])
        engine = AsyncEngine(client=await SocketClient.connect(sock))
        with pytest.raises(SlipstreamError) as told:
            await asyncio.wait_for(engine.until_ready(), PATIENCE)
        with pytest.raises(EngineDead, match=re.escape(str(told.value))):  # a request is not what was wrong
            await last(engine.generate([1], PARAMS))
        await engine.close()
        return told.value, core.wait(PATIENCE)

    return asyncio.run(main())


def test_a_failed_start_reports_its_root_cause(folder, tmp_path):
    told, ended = failed_start({"model": str(tmp_path / "nowhere")})
    assert "nowhere" in str(told) and type(told) is ModelNotFound
    assert ended == "the engine core ended with exit code 1"
    told, _ = failed_start({"model": folder}, {"model": folder})
    assert "two models are called" in str(told) and type(told) is InvalidOption


def test_a_missing_model_is_reported_before_torch_is_loaded(tmp_path):
    """Also one that is looked up at the hub, which only a core does."""

    class Told:
        stages = []

        def broadcast(self, message):
            self.stages.append(message.stage)

    with pytest.raises(ModelNotFound):
        core_process._load(CoreStart([Options(model=str(tmp_path / "none"))]), Told())
    assert Told.stages == ["finding the model"]


def test_a_core_killed_in_the_middle_ends_every_stream(folder, scripted):
    async def scenario():
        core, (sock,) = spawn_core([make_options(model=folder, **(SMALL | {"max_model_len": 100_000}))])
        engine = AsyncEngine(client=await SocketClient.connect(sock))
        await asyncio.wait_for(engine.until_ready(), PATIENCE)
        seen = 0
        with pytest.raises(EngineDead):
            async for _ in engine.generate([1, 2], PARAMS.with_changes(max_tokens=90_000)):
                if not seen:
                    core.process.send_signal(signal.SIGKILL)
                seen += 1
        with pytest.raises(EngineDead):
            await last(engine.generate([1], PARAMS))
        assert engine.load.num_open == 0
        await engine.close()
        return core.wait(PATIENCE)

    assert "SIGKILL" in asyncio.run(scenario())


PARENT = """
import sys, time
from slipstream.config.options import Options, make_options
from slipstream.transport.replica_start import spawn_core
core, socks = spawn_core([make_options(model=sys.argv[1], num_threads=1)])
print(core.process.pid, flush=True)
time.sleep(600)
"""


def test_a_core_does_not_outlive_its_parent(folder, scripted):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, folder], stdout=subprocess.PIPE, env=child_env())
    core = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + PATIENCE
    while is_alive(core) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(core)
