import asyncio

from serve.chaos import CHAOS_FLAGS, run_chaos
from serve.server_process import ServerProcess


def test_every_request_of_many_clients_ends_exactly_once_and_nothing_leaks(tiny_folder):
    """Few pages, so that requests are preempted too. The core counts pages and rows as it ends."""
    server = ServerProcess(tiny_folder, *CHAOS_FLAGS)
    ends = asyncio.run(run_chaos(server.port, 300, 30, seed=1))
    assert sum(ends.values()) == 300 and ends["done"] and ends["left"], ends
    status, load = server.call("GET", "/load", authorization="Bearer key")
    assert status == 200 and load["server_load"] == load["queued_requests"] == load["queued_tokens"] == 0
    assert server.stop() == 0, server.lines[-5:]


def test_sigterm_under_load_ends_in_order(tiny_folder):
    server = ServerProcess(tiny_folder, *CHAOS_FLAGS, "--drain-timeout", "0.5", scripted=True)

    async def main():
        crowd = asyncio.create_task(run_chaos(server.port, 100_000, 20, seed=2))
        await asyncio.sleep(0)
        while server.call("GET", "/load", authorization="Bearer key")[1]["steps"] == 0:
            await asyncio.sleep(0.01)
        server.process.terminate()
        await asyncio.gather(crowd, return_exceptions=True)  # refused or cut off, each of them

    asyncio.run(main())
    assert server.end() == 0, server.lines[-5:]
