"""/v1/files and /v1/batches over a scripted core: results, errors, cancelling, expiry, privacy, and a killed server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from child import child_env
from patience import PATIENCE
from scripted_core import ScriptedCore, facts
from serve.asgi import Door
from serve.samples import MESSAGES
from slipstream.base.errors import EngineAsleep, InvalidOption
from slipstream.contracts.request import FinishReason
from slipstream.serve.http.server import batch_runner as runner_module
from slipstream.serve.http.server import batch_store as store_module
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.batch_runner import BatchRunner
from slipstream.serve.http.server.batch_store import BatchService, BatchStore
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.state import State
from slipstream.serve.http.table import all_routes
from slipstream.transport.frames import Refused

KEY = {"authorization": "Bearer mine"}
OTHER = {"authorization": "Bearer other"}


def form(boundary=b"xyz", **parts):
    """The body and the header of an upload."""
    body = b""
    for name, value in parts.items():
        filename = b'; filename="in.jsonl"' if name == "file" else b""
        head = b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n' % (boundary, name.encode(), filename)
        body += head + (value if isinstance(value, bytes) else value.encode()) + b"\r\n"
    return body + b"--%b--\r\n" % boundary, {"content-type": f"multipart/form-data; boundary={boundary.decode()}"}


def line(name, **body):
    body = body or {"prompt": name, "max_tokens": 3}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


@asynccontextmanager
async def batch_server(folder, store, *, runs=True, answers=True, **more):
    """A door with a store, and the task that runs batches."""
    engine, core = await ScriptedCore.open(facts(folder, max_waiting=1000), answers=answers)
    given = ServerSettings(**({"batch_dir": str(store), "api_key": ["mine", "other"]} | more))
    state = State(given, engine)
    state.batches = BatchService(given)
    door = Door(App(state, all_routes()), core)
    task = asyncio.ensure_future(BatchRunner(door.app, state.batches).run()) if runs else None
    try:
        yield door
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        state.batches.close()
        await engine.close()


async def upload(door, data, headers=KEY, **fields):
    text = data if isinstance(data, str) else "\n".join(map(json.dumps, data))
    body, kind = form(file=text, **({"purpose": "batch"} | fields))
    return await door.post("/v1/files", body, **headers, **kind)


async def create(door, lines, headers=KEY, **more):
    file = (await upload(door, lines, headers)).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"} | more
    return (await door.post("/v1/batches", body, **headers)).json()


async def until(door, batch, *states, headers=KEY):
    for _ in range(2000):
        found = (await door.get(f"/v1/batches/{batch['id']}", **headers)).json()
        if found["status"] in states:
            return found
        await asyncio.sleep(0.005)
    raise AssertionError(found)


async def content(door, file):
    return [json.loads(each) for each in (await door.get(f"/v1/files/{file}/content", **KEY)).body.splitlines()]


def test_a_batch_has_files_of_results_and_errors(folder, tmp_path):
    async def main():
        async with batch_server(folder, tmp_path / "store") as door:
            lines = [line("a"), line("bad", prompt="x", best_of=3), line("b"), line("empty", prompt=[])]
            batch = await create(door, lines, metadata={"name": "mine"})
            assert batch["status"] == "validating" and batch["expires_at"] == batch["created_at"] + 86400
            done = await until(door, batch, "completed", "failed")
            assert done["request_counts"] == {"total": 4, "completed": 2, "failed": 2}, done
            assert done["metadata"] == {"name": "mine"} and done["errors"] is None
            good, bad = await content(door, done["output_file_id"]), await content(door, done["error_file_id"])
            assert [each["custom_id"] for each in good] == ["a", "b"]
            assert good[0]["response"]["body"]["choices"][0]["text"] == "All" and good[0]["error"] is None
            assert [each["response"]["status_code"] for each in bad] == [400, 400]
            assert bad[0]["response"]["body"]["error"]["param"] == "best_of"
            (listed,) = (await door.get("/v1/batches", **KEY)).json()["data"]
            assert listed == done
            assert door.state.engine.load.num_open == 0

    asyncio.run(main())


def test_a_file_that_cannot_be_run_fails_the_batch_with_its_lines(folder, tmp_path):
    async def main():
        async with batch_server(folder, tmp_path) as door:
            wrong = line("c") | {"url": "/v1/embeddings"}
            text = "\n".join(["{", json.dumps(line("a")), json.dumps(line("a")), json.dumps(wrong)])
            done = await until(door, await create(door, text), "failed")
            found = [(each["line"], each["code"]) for each in done["errors"]["data"]]
            assert found == [(1, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "mismatched_url")]
            done = await until(door, await create(door, "\n \n"), "failed")
            assert done["errors"]["data"][0]["code"] == "empty_file"

    asyncio.run(main())


def test_the_runner_ends_when_it_is_cancelled_as_a_batch_ends(folder, tmp_path):
    """The end of a batch wakes the runner. A cancellation in the same turn of the event loop must not be lost."""

    async def main():
        async with batch_server(folder, tmp_path, runs=False) as door:
            runner = BatchRunner(door.app, door.state.batches)
            for _ in range(3):
                task = asyncio.ensure_future(runner.run())
                await asyncio.sleep(0.05)  # it waits for a change
                door.state.batches.changed.set()
                await asyncio.sleep(0)  # the event's waiter is done, the runner has not run yet
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=PATIENCE)
                task.cancel()
                assert done, "the cancellation was lost"

    asyncio.run(main())


def test_cancelling_keeps_the_results_so_far_and_aborts_the_rest(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "_POLL_SECONDS", 0.01)

    async def main():
        async with batch_server(folder, tmp_path, answers=False) as door:
            batch = await create(door, [line("a"), line("b")])
            await door.core.until(lambda: len(door.core.submits) == 2)
            first = door.core.submits[0]
            door.core.token(first, 65, end=FinishReason.STOP)
            while (await until(door, batch, "in_progress"))["request_counts"]["completed"] == 0:
                await asyncio.sleep(0.005)
            assert (await door.post(f"/v1/batches/{batch['id']}/cancel", b"", **KEY)).json()["status"] == "cancelling"
            done = await until(door, batch, "cancelled")
            assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 0} and done["error_file_id"] is None
            assert len(await content(door, done["output_file_id"])) == 1
            await door.core.until(lambda: len(door.core.aborts) == 1)
            again = await door.post(f"/v1/batches/{batch['id']}/cancel", b"", **KEY)
            assert again.status == 409 and "cancelled" in again.error

    asyncio.run(main())


def test_lines_that_an_admin_ends_or_that_find_the_engine_asleep_run_again(folder, tmp_path):
    async def main():
        async with batch_server(folder, tmp_path, answers=False, admin_key="root") as door:
            core = door.core
            batch = await create(door, [line("a")])
            await core.until(lambda: core.submits)
            core.token(core.submits[0], 65)
            await door.post("/abort_requests", b"", authorization="Bearer root")
            door.pass_time(10)
            await core.until(lambda: len(core.submits) == 2)
            core.say(Refused.of(core.submits[1].request_id, EngineAsleep("the engine is asleep; call wake_up first")))
            while door.state.counters.requests["/v1/completions", 503] < 2:
                await asyncio.sleep(0)
            door.pass_time(10)
            await core.until(lambda: len(core.submits) == 3)
            core.token(core.submits[2], 66, end=FinishReason.STOP)
            done = await until(door, batch, "completed", "failed")
            assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
            ((choice,),) = [each["response"]["body"]["choices"] for each in await content(door, done["output_file_id"])]
            assert (choice["text"], choice["finish_reason"]) == ("B", "stop")

    asyncio.run(main())


def test_lines_of_an_expired_batch_have_an_error(folder, tmp_path, monkeypatch):
    """By the time that has passed: the clock may be set meanwhile."""
    monkeypatch.setattr(runner_module, "_POLL_SECONDS", 0.01)
    passed, reads = [0.0], []

    def monotonic():
        reads.append(1)
        return time.monotonic() + passed[0]

    clock = SimpleNamespace(time=time.time, monotonic=monotonic)
    monkeypatch.setattr(runner_module, "time", clock)

    async def main():
        async with batch_server(folder, tmp_path, answers=False) as door:
            batch = await create(door, [line("a"), line("b")])
            await door.core.until(lambda: len(door.core.submits) == 2)
            for jump in (90_000, -90_000):
                clock.time = lambda jump=jump: time.time() + jump
                seen = len(reads)
                while len(reads) < seen + 10:
                    await asyncio.sleep(0)
                assert (await door.get(f"/v1/batches/{batch['id']}", **KEY)).json()["status"] == "in_progress"
            passed[0] = 90_000.0
            done = await until(door, batch, "expired")
            bad = await content(door, done["error_file_id"])
            assert [each["error"]["code"] for each in bad] == ["batch_expired"] * 2 and bad[0]["response"] is None
            assert done["request_counts"] == {"total": 2, "completed": 0, "failed": 2}

    asyncio.run(main())


def test_files_and_batches_are_private_to_their_key(folder, tmp_path):
    async def main():
        async with batch_server(folder, tmp_path, runs=False) as door:
            batch = await create(door, [line("a")])
            file = batch["input_file_id"]
            for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{batch['id']}"):
                assert (await door.get(path, **KEY)).status == 200
                assert (await door.get(path, **OTHER)).status == 404
            for path in ("/v1/files", "/v1/batches"):
                assert (await door.get(path, **OTHER)).json()["data"] == []
            stolen = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
            refused = await door.post("/v1/batches", stolen, **OTHER)
            assert refused.status == 404 and refused.json()["error"]["param"] == "input_file_id"
            assert (await door.post(f"/v1/batches/{batch['id']}/cancel", b"", **OTHER)).status == 404
            assert (await door.begin("DELETE", f"/v1/files/{file}", **OTHER).end()).status == 404
            deleted = (await door.begin("DELETE", f"/v1/files/{file}", **KEY).end()).json()
            assert deleted == {"id": file, "object": "file", "deleted": True}
            assert (await door.get(f"/v1/files/{file}", **KEY)).status == 404
        assert b"mine" not in b"".join(each.read_bytes() for each in tmp_path.glob("batches.sqlite*"))

    asyncio.run(main())


def test_lists_have_pages(folder, tmp_path):
    async def main():
        async with batch_server(folder, tmp_path, runs=False) as door:
            files = [(await upload(door, f"{place}")).json()["id"] for place in range(3)]
            body = {"endpoint": "/v1/completions", "completion_window": "24h"}
            batches = [(await door.post("/v1/batches", body | {"input_file_id": id}, **KEY)).json() for id in files]

            async def ids(path, query=b""):
                pairs = [(b"authorization", b"Bearer mine")]
                found = (await door.begin_raw("GET", path, pairs, query, b"").end()).json()
                return [each["id"] for each in found["data"]], found["has_more"]

            assert await ids("/v1/files", b"order=asc&limit=2") == (files[:2], True)
            assert await ids("/v1/files", f"order=asc&after={files[1]}".encode()) == (files[2:], False)
            newest = [each["id"] for each in reversed(batches)]
            assert await ids("/v1/batches", b"limit=2") == (newest[:2], True)
            assert await ids("/v1/batches", f"limit=2&after={newest[1]}".encode()) == (newest[2:], False)
            assert await ids("/v1/files", b"purpose=batch_output") == ([], False)
            service = door.state.batches
            await service.run(service.store.add_file, service.store.owner(b"mine"), "x", "batch_output", b"x", 60)
            assert await ids("/v1/files", b"purpose=batch&limit=1") == (files[2:], True)
            deleted = files.pop().encode()
            await door.begin("DELETE", f"/v1/files/{deleted.decode()}", **KEY).end()
            for query in (b"limit=0", b"limit=x", b"order=up", b"page=2", b"after=x", b"after=" + deleted):
                pairs = [(b"authorization", b"Bearer mine")]
                refused = (await door.begin_raw("GET", "/v1/files", pairs, query, b"").end()).json()
                assert refused["error"]["param"] == query.partition(b"=")[0].decode()
            refused = (await door.begin_raw("GET", "/v1/batches", pairs, b"after=" + deleted, b"").end()).json()
            assert refused["error"]["param"] == "after" and "none of your batches" in refused["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"), ({"file": ""}, "file"), ({"other": "x"}, "other"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, "expires_after[seconds]"),
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor]"),
    ],
)  # fmt: skip
def test_a_field_of_an_upload_that_cannot_be_is_refused_by_name(folder, tmp_path, fields, param):
    async def main():
        async with batch_server(folder, tmp_path, runs=False) as door:
            body, kind = form(**({"file": "{}", "purpose": "batch"} | fields))
            refused = await door.post("/v1/files", body, **KEY, **kind)
            assert refused.status == 400 and refused.json()["error"]["param"] == param, refused.body
            assert param.partition("[")[0] in refused.error

    asyncio.run(main())


def test_limits_of_the_store(folder, tmp_path):
    async def main():
        async with batch_server(
            folder, tmp_path, runs=False, api_key=["mine"], max_store_bytes=1000, max_file_bytes=1200
        ) as door:
            assert (await upload(door, "x" * 1200)).status == 413
            later = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
            first = await upload(door, "x" * 500, **later)
            assert first.json()["expires_at"] == first.json()["created_at"] + 3600
            refused = await upload(door, "x" * 501)
            assert refused.status == 400 and "--max-store-bytes" in refused.error
            await door.begin("DELETE", f"/v1/files/{first.json()['id']}", **KEY).end()
            assert (await upload(door, "x" * 501)).status == 200

    asyncio.run(main())


def test_each_api_key_has_an_equal_share_of_the_store(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_MAX_ROWS", 6)

    async def main():
        async with batch_server(folder, tmp_path, runs=False, max_store_bytes=1000) as door:
            assert (await upload(door, "x" * 400)).status == 200
            refused = await upload(door, "x" * 101)
            assert refused.status == 400 and "500 bytes for each of 2 API keys" in refused.error
            assert (await upload(door, "x" * 500, OTHER)).status == 200
            assert [(await upload(door, "x")).status for _ in range(3)] == [200, 200, 400]
            assert (await upload(door, "x", OTHER)).status == 400  # its bytes are used

    asyncio.run(main())


def test_a_store_that_fills_while_a_batch_runs_fails_the_batch(folder, tmp_path):
    async def main():
        lines = [line(f"{place}") for place in range(4)]
        size = len("\n".join(map(json.dumps, lines)))
        async with batch_server(folder, tmp_path, api_key=["mine"], max_store_bytes=size + 900) as door:
            done = await until(door, await create(door, lines), "failed")
            assert done["errors"]["data"][0]["code"] == "store_full" and 0 < done["request_counts"]["completed"] < 4
            assert len(await content(door, done["output_file_id"])) == done["request_counts"]["completed"]

    asyncio.run(main())


def test_the_results_of_one_batch_are_bounded(folder, tmp_path, monkeypatch):
    """They become one value of the database, which has a limit."""
    monkeypatch.setattr(store_module, "MAX_RESULT_BYTES", 900)

    async def main():
        async with batch_server(folder, tmp_path) as door:
            done = await until(door, await create(door, [line(f"{place}") for place in range(4)]), "failed")
            assert "another batch" in done["errors"]["data"][0]["message"]
            assert len(await content(door, done["output_file_id"])) == done["request_counts"]["completed"] > 0

    asyncio.run(main())


def test_contents_in_memory_are_bounded(folder, tmp_path):
    async def main():
        async with batch_server(folder, tmp_path, runs=False, max_bodies_bytes=1000) as door:
            service, data = door.state.batches, "x" * 1_500_000
            id = (await upload(door, data)).json()["id"]  # above the limit, and alone
            got = await door.get(f"/v1/files/{id}/content", **KEY)
            assert got.body == data.encode() and got.headers["content-length"] == "1500000" and not service.bytes_open
            with service.holding(1):
                for refused in (await door.get(f"/v1/files/{id}/content", **KEY), await upload(door, data)):
                    assert refused.status == 429 and "retry-after" in refused.headers
            assert (await upload(door, data)).status == 200 and not service.bytes_open

    asyncio.run(main())


def test_a_full_disk_is_an_error_by_name(folder, tmp_path):
    async def main():
        async with batch_server(folder, tmp_path, runs=False) as door:
            store = door.state.batches.store
            (pages,) = store._db.execute("PRAGMA page_count").fetchone()
            store._db.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite then says that the disk is full
            refused = await upload(door, "x" * 100_000)
            assert refused.status == 400 and "disk" in refused.error
            assert (await upload(door, "x")).status == 200  # no transaction is left open

    asyncio.run(main())


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(runner_module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(runner_module, "_AGAIN_SECONDS", 0.01)


async def until_health(door, status, **more):
    deadline = time.monotonic() + PATIENCE
    while (found := (await door.get("/health")).json()) != {"status": status, "stage": None} | more:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.005)


def test_a_locked_database_delays_batches_and_health_says_so(folder, tmp_path, fast, caplog):
    """Another process writes, such as a backup. The lock is there before the runner, and comes again in mid-batch."""

    async def main():
        async with batch_server(folder, tmp_path, runs=False, answers=False) as door:
            service = door.state.batches
            service.store._db.execute("PRAGMA busy_timeout = 1")
            batch = await create(door, [line("a"), line("b")])
            with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite", isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                task = asyncio.ensure_future(BatchRunner(door.app, service).run())
                await until_health(door, "degraded", failing=["batches"])
                refused = await upload(door, "{}")
                assert refused.status == 503 and refused.json()["error"]["code"] == "store_unavailable"
                other.execute("ROLLBACK")
                await door.core.until(lambda: len(door.core.submits) == 2)
                await until_health(door, "ok")
                other.execute("BEGIN IMMEDIATE")
                for submit in door.core.submits:
                    door.core.token(submit, 65, end=FinishReason.STOP)
                await until_health(door, "degraded", failing=["batches"])
                page = (await door.get("/metrics", **KEY)).body.decode()
                assert 'slipstream_failing{task="batches"} 1.0' in page
                other.execute("ROLLBACK")
            done = await until(door, batch, "completed", "failed")
            assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
            assert len(door.core.submits) == 2  # results were kept, not computed again
            await until_health(door, "ok")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert "database is locked" in caplog.text


def test_reads_that_work_do_not_end_the_alarm_of_writes_that_fail(folder, tmp_path, fast, monkeypatch, caplog):
    """Another process that writes does not lock out readers, and a running batch reads its state again and again."""
    calls = Counter()
    fails = True

    def counted(method, name):
        def call(*args, **kwargs):
            calls[name] += 1
            if fails and name == "add_result":
                raise sqlite3.OperationalError("database is locked")
            return method(*args, **kwargs)

        call.__name__ = name
        return call

    async def main():
        nonlocal fails
        async with batch_server(folder, tmp_path) as door:
            store = door.state.batches.store
            for name in ("open_batch", "add_result"):
                monkeypatch.setattr(store, name, counted(getattr(store, name), name))
            batch = await create(door, [line("a")])
            await until_health(door, "degraded", failing=["batches"])
            calls.clear()
            while min(calls["open_batch"], calls["add_result"]) < 5:
                assert (await door.get("/health")).json()["status"] == "degraded"
                await asyncio.sleep(0)
            assert "works again" not in caplog.text and caplog.text.count("tried again") == 1
            fails = False
            await until(door, batch, "completed")
            await until_health(door, "ok")

    asyncio.run(main())


class Panic(BaseException):
    """As native code raises it."""


@pytest.mark.parametrize("failure", [Panic("a panic"), asyncio.CancelledError()])
def test_a_line_that_raises_no_exception_fails_alone(folder, tmp_path, monkeypatch, fast, failure):
    async def main():
        async with batch_server(folder, tmp_path) as door:
            read = door.state.engine.read

            def explode(prepared, *args, **more):
                if list(prepared[0][0].prompt_token_ids) == list(b"bad"):
                    raise failure
                return read(prepared, *args, **more)

            monkeypatch.setattr(door.state.engine, "read", explode)
            done = await until(door, await create(door, [line("a"), line("bad"), line("c")]), "completed", "failed")
            assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}, done
            (bad,) = await content(door, done["error_file_id"])
            assert bad["custom_id"] == "bad" and bad["response"]["status_code"] == 500

    asyncio.run(main())


@pytest.mark.parametrize("failure", [Panic("a panic"), asyncio.CancelledError()])
def test_a_result_that_storing_loses_fails_the_batch(folder, tmp_path, monkeypatch, fast, failure):
    """A task that ends by a CancelledError counts as cancelled, not as failed: the line would be missing."""

    async def main():
        async with batch_server(folder, tmp_path) as door:
            add = door.state.batches.store.add_result

            def explode(owner, id, index, *args):
                if index == 1:
                    raise failure
                return add(owner, id, index, *args)

            monkeypatch.setattr(door.state.batches.store, "add_result", explode)
            done = await until(door, await create(door, [line("a"), line("b"), line("c")]), "completed", "failed")
            assert done["status"] == "failed" and done["errors"]["data"][0]["code"] == "internal_error"

    asyncio.run(main())


@pytest.mark.parametrize("cancels", [False, True])
def test_a_batch_that_fills_the_disk_fails_when_there_is_space_again(folder, tmp_path, fast, cancels):
    """Its end needs space too: the files of its results."""

    async def main():
        async with batch_server(folder, tmp_path, answers=False) as door:
            service = door.state.batches
            batch = await create(door, [line(f"{place}") for place in range(40)])
            await door.core.until(lambda: len(door.core.submits) == 40)
            (pages,) = (await service.run(service.store._db.execute, "PRAGMA page_count")).fetchone()
            await service.run(service.store._db.execute, f"PRAGMA max_page_count = {pages + 2}")
            for submit in door.core.submits:
                door.core.token(submit, 65, end=FinishReason.STOP)
            await until_health(door, "degraded", failing=["batches"])
            if cancels:
                await door.post(f"/v1/batches/{batch['id']}/cancel", b"", **KEY)
            await service.run(service.store._db.execute, "PRAGMA max_page_count = 1000000")
            done = await until(door, batch, "failed")
            assert done["errors"]["data"][0]["code"] == "store_full" and 0 < done["request_counts"]["completed"] < 40
            assert len(await content(door, done["output_file_id"])) == done["request_counts"]["completed"]
            await until_health(door, "ok")

    asyncio.run(main())


@pytest.fixture(scope="module")
def stored_files(folder, tmp_path_factory):
    """The files of a store as a killed server leaves them, with a finished batch and one that was running: with the
    log of changes, and after another server has copied it into the database."""
    store, later = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("later")

    async def main():
        async with batch_server(folder, store) as door:
            await until(door, await create(door, [line("a"), line("empty", prompt=[])]), "completed")
            door.core.answers = False
            batch = await create(door, [line(f"{place}") for place in range(3)])
            await door.core.until(lambda: len(door.core.submits) == 4)
            door.core.token(door.core.submits[1], 65, end=FinishReason.STOP)
            while (await until(door, batch, "in_progress"))["request_counts"]["completed"] == 0:
                await asyncio.sleep(0.005)
            shutil.copytree(store, later, dirs_exist_ok=True)

    asyncio.run(main())
    log = {each.name: each.read_bytes() for each in later.glob("batches.sqlite*")}
    BatchStore(str(later), 2**30).close()
    return log, {each.name: each.read_bytes() for each in later.glob("batches.sqlite*")}


def changed_at_random(rng, data):
    at, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return rng.choice(
        [
            lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
            lambda: data[:at],
            lambda: data[:at] + bytes(min(end - at, 64)) + data[min(end, at + 64) :],
            lambda: data[: at & -4096] + data[end & -4096 :],
            lambda: bytes(each ^ (rng.random() < 0.01) for each in data[:end]) + data[end:],
            lambda: rng.randbytes(at % 5000),
        ]
    )()


def use_all(store):
    """Calls the methods of a store as routes and the runner do. Returns what the damage refused."""
    refused = []

    def call(method, *args):
        try:
            return method(*args)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            assert store_module.is_damage(error), (error, error.__class__, getattr(error, "sqlite_errorname", None))
            refused.append(error)
        except store_module.StoreFull:
            pass  # a size has changed

    owner = store.owner(b"mine")
    for file in call(store.files, owner, None, 100, True) or []:
        call(store.content, owner, file.id)
    for batch in call(store.batches, owner, None, 100) or []:
        call(store.batch, owner, batch.id)
    call(store.delete_expired)
    for batch in call(store.open_batches) or []:
        if call(store.open_batch, *batch) is not None:
            call(store.line_indices, batch[1])
            call(store.change_batch, *batch, runner_module._begun(4))
            call(store.add_result, *batch, 2, b"{}", True)
            call(store.finish, *batch, runner_module._ended("completed"))
    call(store.add_file, owner, "name", "batch", b"x" * 5000, 5000)
    return refused


def test_a_database_that_was_changed_at_random_is_refused_by_name(stored_files, tmp_path):
    """At the start, or when a method reads the damaged part."""
    rng = random.Random(41)
    outcomes = Counter()
    for trial in range(60):
        folder = tmp_path / f"{trial}"
        folder.mkdir()
        files = rng.choice(stored_files)
        changed = rng.choice(list(files))
        for name, data in files.items():
            (folder / name).write_bytes(changed_at_random(rng, data) if name == changed else data)
        try:
            store = BatchStore(str(folder), 2**30)
        except InvalidOption as error:
            outcomes["refused"] += 1
            assert f"{folder / 'batches.sqlite'} is damaged" in str(error) and "move it away" in str(error)
            continue
        outcomes["damaged" if use_all(store) else "used"] += 1
        store.close()
    assert set(outcomes) == {"refused", "damaged", "used"}, outcomes


DAMAGES = {  # statements, and what says that something is wrong
    "no salt": ("DELETE FROM salt", "start"),
    "short salt": ("UPDATE salt SET salt = x'00'", "start"),
    "text as salt": ("UPDATE salt SET salt = 'salt'", "start"),
    "column": ("ALTER TABLE files RENAME COLUMN size TO sise", "use"),
    "state of a file": ("UPDATE files SET state = substr(state, 9)", "use"),
    "short file": ("UPDATE files SET data = substr(data, 9)", "use"),
    "text as file": ("UPDATE files SET data = 'text'", "use"),
    "state of a batch": ("UPDATE batches SET state = x'ff' WHERE open", "use"),
    "end of a batch": ("UPDATE batches SET open = 1", "use"),
    "no owner": ("UPDATE batches SET owner = NULL WHERE open", "use"),
    "no UTF-8": ("UPDATE batches SET owner = CAST(x'ff' AS TEXT) WHERE open", "use"),
    "no bytes count": ("UPDATE batches SET result_bytes = 'x'", None),
    "text as result": ("UPDATE results SET line = 'text'", "use"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_the_database_is_found(stored_files, tmp_path, damage):
    for name, data in stored_files[1].items():
        (tmp_path / name).write_bytes(data)
    statement, found = DAMAGES[damage]
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite", isolation_level=None)) as db:
        db.execute(statement)
    if found == "start":
        with pytest.raises(InvalidOption, match="is damaged"):
            BatchStore(str(tmp_path), 2**30)
        return
    store = BatchStore(str(tmp_path), 2**30)
    assert bool(use_all(store)) == (found == "use")
    store.close()


def test_a_damaged_batch_leaves_the_others_alone(folder, stored_files, tmp_path, fast, caplog):
    """Nothing is tried in a loop without a pause, and /health, routes and the log say what to do."""
    for name, data in stored_files[1].items():
        (tmp_path / name).write_bytes(data)
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE batches SET owner = NULL WHERE open")

    async def main():
        async with batch_server(folder, tmp_path) as door:
            await until_health(door, "degraded", failing=["batches"])
            await until(door, await create(door, [line("a")]), "completed")
            store = door.state.batches.store
            await door.state.batches.run(store._db.execute, "UPDATE batches SET state = x'7b'")
            refused = await door.get("/v1/batches", **KEY)
            assert refused.status == 503 and "is damaged" in refused.error and "move it away" in refused.error
            assert "retry-after" not in refused.headers and str(tmp_path) not in refused.error

    asyncio.run(main())
    assert "not found, and among those that are not finished" in caplog.text and "Traceback" not in caplog.text


def test_empty_lines_take_no_memory():
    data = b" \r\n" * 50_000 + json.dumps(line("a")).encode()
    tracemalloc.start()
    try:
        lines, errors = runner_module.check_lines(data, "/v1/completions")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert lines == [(150_000, len(data))] and not errors
    assert runner_module.check_lines(data[:-1], "/v1/completions")[1][0].line == 50_001


def test_without_a_folder_the_routes_are_disabled(folder):
    async def main():
        engine, core = await ScriptedCore.open(facts(folder))
        door = Door(App(State(ServerSettings(), engine), all_routes()), core)
        assert "--batch-dir" in (await door.get("/v1/files")).error
        await engine.close()

    asyncio.run(main())
    with pytest.raises(InvalidOption, match="batch_dir"):
        BatchStore(str(folder / "tokenizer.json"), 1000)


def test_a_web_page_cannot_upload(folder, tmp_path):
    """A form needs no preflight request."""

    async def main():
        async with batch_server(folder, tmp_path, runs=False, api_key=[], allowed_origins=["http://good"]) as door:
            for headers, status in (
                ({"origin": "http://evil"}, 403), ({"origin": "http://good"}, 200), ({}, 200),
                ({"origin": "http://evil", "authorization": "Bearer x"}, 200),
            ):  # fmt: skip
                assert (await upload(door, "{}", headers)).status == status
            body, _ = form(file="{}", purpose="batch")
            assert (await door.post("/v1/files", body)).status == 415

    asyncio.run(main())


@pytest.mark.parametrize(
    "lines",
    [
        (b"Content-Disposition: form-data; name=file; filename=in.jsonl; filename*=utf-8''in.jsonl",),  # .NET's client
        (b'content-disposition: form-data; FileName="in.jsonl"; NAME="file"',),
        (
            b'Content-Type: text/plain; name="other"',
            b'Content-Disposition: form-data; name="file"; filename="in.jsonl"',
        ),
    ],
    ids=["unquoted", "case", "other header"],
)
@pytest.mark.parametrize("before", [b"", b"\r\n", b"A form.\r\n"], ids=["", "empty line", "preamble"])
def test_forms_as_other_clients_write_them(folder, tmp_path, before, lines):
    async def main():
        async with batch_server(folder, tmp_path, runs=False) as door:
            purpose = b"Content-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n--xyz\r\n"
            body = before + b"--xyz\r\n" + purpose + b"\r\n".join(lines) + b"\r\n\r\n{}\r\n--xyz--\r\n"
            kind = {"content-type": 'multipart/form-data; boundary="xyz"'}
            stored = await door.post("/v1/files", body, **KEY, **kind)
            assert stored.status == 200, stored.body
            assert (stored.json()["filename"], stored.json()["bytes"]) == ("in.jsonl", 2)

    asyncio.run(main())


def test_any_bytes_of_a_form_get_an_answer_in_our_shape(folder, tmp_path):
    start, kind = form(file="{}", purpose="batch")
    bodies = []

    pieces = st.sampled_from([b"", b"\xff", b"--xyz", b"\r\n\r\n", b'"', b"="])

    @given(st.integers(0, len(start)), st.integers(0, 8), pieces)
    @settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def collect(at, width, piece):
        bodies.append(start[:at] + piece + start[at + width :])

    collect()

    async def main():
        async with batch_server(folder, tmp_path, runs=False) as door:
            for body in bodies:
                exchange = await door.post("/v1/files", body, **KEY, **kind)
                assert exchange.status in (200, 400), (body, exchange.body)
                assert exchange.status == 200 or set(exchange.json()["error"]) == {"message", "type", "param", "code"}

    asyncio.run(main())


_CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from serve import test_batches as tests
from slipstream.serve.http.server.batch_store import BatchStore
add = BatchStore.add_result
def add_and_die(store, owner, id, place, line, ok):
    add(store, owner, id, place, line, ok)
    if len(store.line_indices(id)) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
BatchStore.add_result = add_and_die
async def main():
    async with tests.batch_server(Path(sys.argv[1]), sys.argv[2]) as door:
        await tests.create(door, [tests.line(f"line{place}") for place in range(8)])
        await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_killed_server_continues_without_a_line_twice_or_lost(folder, tmp_path):
    command = [sys.executable, "-c", _CHILD, str(folder), str(tmp_path)]
    killed = subprocess.run(command, env=child_env(), timeout=PATIENCE)
    assert killed.returncode == -signal.SIGKILL

    async def main():
        async with batch_server(folder, tmp_path) as door:
            (batch,) = (await door.get("/v1/batches", **KEY)).json()["data"]
            done = await until(door, batch, "completed")
            assert done["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
            names = [each["custom_id"] for each in await content(door, done["output_file_id"])]
            assert names == [f"line{place}" for place in range(8)]
            assert len(door.core.submits) == 5  # three had a result

    asyncio.run(main())


def test_two_front_ends_run_a_batch_once(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "_POLL_SECONDS", 0.01)

    async def main():
        async with batch_server(folder, tmp_path) as one, batch_server(folder, tmp_path) as two:
            batches = [await create(door, [line("a"), line("b")]) for door in (one, two)]
            for batch in batches:
                await until(one, batch, "completed")
            assert sorted((len(one.core.submits), len(two.core.submits))) == [0, 4]

    asyncio.run(main())


def test_the_openai_client_runs_a_batch(tmp_path, folder):
    openai = pytest.importorskip("openai", reason="needs the openai client")
    from serve.test_http_server import served

    async def main():
        async with batch_server(folder, tmp_path) as door, served(door) as port:
            client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="mine", max_retries=0)
            body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3}
            text = json.dumps(line("a") | {"url": "/v1/chat/completions", "body": body}).encode()
            file = await client.files.create(file=("in.jsonl", text), purpose="batch")
            assert (await client.files.retrieve(file.id)).bytes == len(text)
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            while (batch := await client.batches.retrieve(batch.id)).status != "completed":
                await asyncio.sleep(0.005)
            result = json.loads((await client.files.content(batch.output_file_id)).text)
            assert result["response"]["body"]["choices"][0]["message"]["content"] == "All"
            assert [each.id async for each in client.batches.list()] == [batch.id]
            assert len([each.id async for each in client.files.list(purpose="batch")]) == 1
            assert (await client.files.delete(file.id)).deleted
            await client.close()

    asyncio.run(main())
