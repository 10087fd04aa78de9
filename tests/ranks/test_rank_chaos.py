"""A rank that is killed under load: every request ends exactly once, the replica comes back, no process is left."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from child import child_env
from patience import PATIENCE
from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.base.errors import EngineDead
from slipstream.config.options import make_options
from slipstream.ranks import ranks
from slipstream.ranks.ranks import Ranks
from slipstream.transport.replica_start import ReplicaProcesses
from slipstream.transport.replicas import Replica, ReplicaClient
from tiny import write_tiny

SMALL = dict(device="cpu", num_threads=1, max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4)
CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def test_requests_end_once_when_a_rank_is_killed(tmp_path):
    spec = importlib.util.spec_from_file_location("chaos", CHAOS)
    chaos = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chaos)
    folder = str(write_tiny(tmp_path, "llama"))
    sizes = ["--replicas", "1", "--ranks", "2", "--requests", "60", "--kills", "1", "--in-flight", "16", "--only-ranks"]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE):  # a child of the caller, as the servers of other tests are
        ends, kills = asyncio.run(chaos.run(chaos.read_args(["--model", folder, *sizes])))
    assert kills == {"rank": 1}
    assert set(ends) <= {"answered", "lost"} and ends["answered"] >= 44  # at most those in flight had sent tokens


@pytest.mark.parametrize("moment", ["start_child", "wait_until_loaded", "open_group"])
def test_a_rank_that_is_killed_while_the_engine_starts_is_named(tmp_path, moment, monkeypatch):
    """While it is started, when it has loaded, and when it has joined: the start ends, or the first step where the rank
    had nothing left to do for the start. Nothing is left."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    owner = ranks if moment == "start_child" else Ranks
    started, before = [], getattr(owner, moment)

    def then_kill(*given, **named):
        found = before(*given, **named)
        child = found if moment == "start_child" else given[0].children[0]
        started.append(child.process)
        child.process.kill()
        return found

    monkeypatch.setattr(owner, moment, then_kill)
    folder = str(write_tiny(tmp_path, "llama"))
    with (
        pytest.raises(EngineDead, match="rank 1 .*killed by SIGKILL"),
        LLM(folder, tensor_parallel_size=2, use_tqdm_on_load=False, **SMALL) as llm,
    ):
        assert moment == "open_group"
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert started[0].poll() == -signal.SIGKILL
    assert not list((tmp_path / "temporary").glob("slipstream-ranks*"))


def test_a_rank_that_is_killed_between_its_address_and_its_connection_is_named(tmp_path, monkeypatch):
    """gloo would wait for it for ten minutes."""
    before = Ranks.open_group

    def kill_then_open(ranks: Ranks, device):
        store = ranks.folder.path / "store"
        while not (store.exists() and b"joins/1" in store.read_bytes()):
            time.sleep(0.01)
        ranks.children[0].process.kill()
        return before(ranks, device)

    monkeypatch.setattr(Ranks, "open_group", kill_then_open)
    folder = str(write_tiny(tmp_path, "llama"))
    with pytest.raises(EngineDead, match="rank 1 has ended: killed by SIGKILL"):
        LLM(folder, tensor_parallel_size=2, use_tqdm_on_load=False, **SMALL)


_KILLED = """
import os, signal, sys
from slipstream import LLM
from slipstream.ranks import ranks
ranks.start_child = lambda *given, **named: os.kill(os.getpid(), signal.SIGKILL)
LLM(sys.argv[1], tensor_parallel_size=2, device="cpu", num_threads=1, max_model_len=64, num_pages=64)
"""


def test_what_an_engine_left_that_was_killed_while_it_started_goes_with_the_next_start(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = str(write_tiny(tmp_path, "llama"))
    command = [sys.executable, "-c", _KILLED, folder]
    killed = subprocess.run(command, env=child_env(TMPDIR=tempfile.tempdir), timeout=PATIENCE, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name[:17] for path in (tmp_path / "temporary").iterdir()] == ["slipstream-ranks-"]
    (left,) = (tmp_path / "temporary").iterdir()

    def then_stop(*given, **named):
        assert len(list(left.parent.iterdir())) == 1 and not left.exists()
        raise EngineDead("this is all")

    monkeypatch.setattr(ranks, "start_child", then_stop)
    with pytest.raises(EngineDead, match="this is all"):
        LLM(folder, tensor_parallel_size=2, use_tqdm_on_load=False, **SMALL)


class Watched(ReplicaClient):
    """Keeps the errors with which replicas end."""

    def __init__(self, options):
        super().__init__(ReplicaProcesses([options]), 1)
        self.errors: list[BaseException] = []

    def lose(self, replica: Replica, error: BaseException) -> None:
        self.errors.append(error)
        super().lose(replica, error)


def test_an_idle_replica_notices_that_a_rank_was_killed(tmp_path):
    options = make_options(model=str(write_tiny(tmp_path, "llama")), tensor_parallel_size=2, **SMALL)

    async def run():
        client = Watched(options)
        engine = AsyncEngine(client=client)
        await engine.until_ready()
        pid = client.replicas[0].pid
        (rank,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(rank), signal.SIGKILL)
        while not client.errors:  # without any request
            await asyncio.sleep(0.01)
        assert "rank 1 has ended: killed by SIGKILL" in str(client.errors[0])
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_an_idle_engine_in_a_thread_notices_that_a_rank_was_killed(tmp_path):
    async def run():
        engine = AsyncEngine(model=str(write_tiny(tmp_path, "llama")), tensor_parallel_size=2, **SMALL)
        async for _ in engine.generate([1, 2, 3], SamplingParams(max_tokens=4)):
            pass
        (core,) = engine.client.core.cores.values()
        os.kill(core.executor._ranks.children[0].process.pid, signal.SIGKILL)
        while engine.client.thread.is_alive():
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDead, match="rank 1 has ended: killed by SIGKILL"):
            async for _ in engine.generate([1, 2, 3], SamplingParams(max_tokens=4)):
                pass
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
