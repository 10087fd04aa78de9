"""The sync detector finds what makes a host wait, says where, and leaves the rest alone."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext

import pytest
import torch

from slipstream.base.errors import InvalidOption
from slipstream.device.streams import ThreadedStream
from slipstream.device.sync_check import HotPath, SyncFound, host_waits, sync_allowed, watch
from slipstream.device.sync_check.__main__ import main
from slipstream.device.sync_check.watch import _watching, copy_waits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAITS = {
    "item()": lambda x: x.sum().item(),
    "item() ": lambda x: bool(x.sum() > 0),
    "item()  ": lambda x: int(x[0]),
    "a mask as an index": lambda x: x[x > 0],
    "nonzero()": lambda x: x.nonzero(),
    "unique()": lambda x: x.unique(),
    "masked_select()": lambda x: x.masked_select(x > 0),
    "repeat_interleave() without output_size": lambda x: x.repeat_interleave(x.long()),
    "equal()": lambda x: x.equal(x),
}
FINE = {
    "arithmetic": lambda x: (x * 2).cumsum(0).sort(),
    "index": lambda x: x[torch.tensor([0, 1])],
    "where": lambda x: torch.where(x > 0, x, 0),
    "repeat": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "copy": lambda x: torch.zeros(3).copy_(x, non_blocking=True),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_found_with_its_place(what):
    x = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
    with watch() as log:
        WAITS[what](x)
    (sync,) = log.found
    assert sync.what == what.strip() and sync.count == 1
    assert "test_sync_check.py" in sync.stack[0] and "in <lambda>" in sync.stack[0]
    assert "torch" not in sync.stack[0].rsplit("/", 2)[1]


@pytest.mark.parametrize("what", FINE)
def test_what_does_not_wait_is_left_alone(what):
    with watch() as log:
        FINE[what](torch.tensor([1.0, 2.0, 3.0]))
    assert not log.found and not log.allowed


@pytest.mark.parametrize("what", WAITS)
def test_reads_of_host_memory_count_where_the_cpu_is_the_device(what):
    x = torch.tensor([1.0, 2.0, 3.0])
    with watch(cpu=False) as log:
        WAITS[what](x)
    assert not log.found
    with watch(cpu=True) as log:
        WAITS[what](x)
    assert log.found


def test_waits_at_one_place_are_one_finding():
    with watch() as log:
        for _ in range(5):
            torch.ones(1, device=DEVICE).item()
    (sync,) = log.found
    assert sync.count == 5
    assert str(sync).startswith("item() (5 times, ") and sync.stack[0] in str(sync)


def test_a_wait_with_a_reason_is_kept_apart():
    with watch() as log, sync_allowed("the test reads its result"):
        torch.ones(1, device=DEVICE).item()
    assert not log.found
    assert [sync.allowed for sync in log.allowed] == ["the test reads its result"]


def test_a_place_that_waits_with_a_reason_and_without_is_found():
    with watch() as log:
        for reason in (sync_allowed("the first time"), nullcontext()):
            with reason:
                torch.ones(1, device=DEVICE).item()
    assert [sync.count for sync in log.found] == [1] == [sync.count for sync in log.allowed]


def test_nothing_is_watched_after_the_block():
    with watch() as log:
        pass
    torch.ones(1, device=DEVICE).item()
    assert not log.found


@pytest.mark.cuda
def test_copies_that_block_are_found_on_cuda():
    pinned, pageable = torch.ones(4).pin_memory(), torch.ones(4)
    on_device = pinned.to("cuda", non_blocking=True)

    def found(work):
        with watch() as log:
            work()
        return [sync.what for sync in log.found]

    assert found(lambda: pinned.to("cuda", non_blocking=True)) == []
    assert found(lambda: on_device + 1) == []
    assert "copy from cpu to cuda from memory that is not pinned" in found(
        lambda: pageable.to("cuda", non_blocking=True)
    )
    assert "copy from cuda to cpu without non_blocking" in found(on_device.cpu)
    assert found(lambda: torch.tensor([1, 2], device="cuda"))
    assert "item()" in found(on_device[0].item)


def test_copies_that_only_say_they_do_not_block():
    """By the host's side: on the CPU alone nothing crosses, so the question is asked directly."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    class Pinned:
        def __init__(self, pinned=True, contiguous=True):
            self.is_pinned, self.is_contiguous = lambda: pinned, lambda: contiguous

    assert copy_waits(cpu, cuda, True, Pinned()) is None
    assert copy_waits(cuda, cpu, True, Pinned()) is None
    assert copy_waits(cuda, cuda, False, None) is None and copy_waits(cpu, cpu, False, Pinned()) is None
    assert copy_waits(cpu, cuda, True, Pinned(False)) == "copy from cpu to cuda from memory that is not pinned"
    assert copy_waits(cuda, cpu, True, Pinned(False)) == "copy from cuda to cpu into memory that is not pinned"
    assert copy_waits(cpu, cuda, True, Pinned(True, False)) == "copy from cpu to cuda from strided memory"
    assert copy_waits(cuda, cpu, True, Pinned(True, False)) == "copy from cuda to cpu into strided memory"
    assert copy_waits(cuda, cpu, False, Pinned()) == "copy from cuda to cpu without non_blocking"


def test_a_wait_for_an_event_is_found_unless_it_has_passed():
    stream, gate = ThreadedStream("late"), threading.Event()
    try:
        stream.run(gate.wait)
        event = stream.record()
        threading.Timer(0.01, gate.set).start()
        with watch() as log:
            event.wait()
            event.wait()
        (sync,) = log.found
        assert (sync.what, sync.count) == ("wait for an event", 1)
        assert any("test_sync_check.py" in line for line in sync.stack)
    finally:
        gate.set()
        stream.close()


def test_other_threads_are_not_watched():
    with watch() as log:
        thread = threading.Thread(target=lambda: torch.ones(1, device=DEVICE).item())
        thread.start()
        thread.join()
    assert not log.found


def test_torchs_warnings_of_other_threads_are_theirs():
    with watch() as log:
        thread = threading.Thread(target=_watching.heard.warn)
        thread.start()
        thread.join()
    assert not log.found


def test_the_switch_warns_once_a_place_or_fails(monkeypatch, caplog):
    def read_twice(hot_path):
        for _ in range(2):
            with hot_path():
                torch.ones(1, device=DEVICE).item()

    monkeypatch.delenv("SLIPSTREAM_SYNC_CHECK", raising=False)
    read_twice(HotPath())
    assert not caplog.records
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "warn")
    read_twice(HotPath())
    (record,) = caplog.records
    assert "item()" in record.getMessage() and "test_sync_check.py" in record.getMessage()
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "error")
    with pytest.raises(SyncFound, match=r"the host waits for the device: item\(\)"):
        read_twice(HotPath())
    with HotPath()(), sync_allowed("the test may"):
        torch.ones(1, device=DEVICE).item()
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "loud")
    with pytest.raises(InvalidOption, match="set it to warn or error"):
        HotPath()


def test_any_program_can_be_watched(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    script = tmp_path / "program.py"
    script.write_text(
        f"import sys, torch\nx = torch.arange(3.0, device={DEVICE!r})\n"
        "print(x[x > 0].sum().item(), sys.argv[1:])\nsys.exit(3)\n"
    )
    assert main([str(script), "--its", "own"]) == 3
    out, err = capsys.readouterr()
    assert out == "3.0 ['--its', 'own']\n"
    assert err.startswith("the host waited 2 times in 2 calls, ")
    assert "item() (1 times, " in err and "a mask as an index" in err
    assert f"\n    {script}:3 in <module>\n" in err


def test_a_program_has_its_neighbours_and_its_last_words(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "beside_the_program", raising=False)
    (tmp_path / "beside_the_program.py").write_text("def read(x):\n    return x.sum().item()\n")
    script = tmp_path / "program.py"
    script.write_text(
        f"import sys, torch, beside_the_program as b\nb.read(torch.ones(3, device={DEVICE!r}))\nsys.exit('enough')\n"
    )
    assert main([str(script)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("enough\n") and f"{tmp_path / 'beside_the_program.py'}:2 in read" in err


def test_a_program_that_is_not_there(capsys):
    assert main(["nowhere.py"]) == 2
    assert capsys.readouterr().err == "there is no nowhere.py here; give a script, or -m and a module\n"


def test_waits_of_a_program_that_fails_are_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    script = tmp_path / "program.py"
    script.write_text(f"import torch\ntorch.ones(1, device={DEVICE!r}).item()\nraise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        main([str(script)])
    assert "the host waited 1 times in 1 calls" in capsys.readouterr().err


@pytest.mark.cuda
def test_events_streams_and_strided_copies_are_found_on_cuda():
    pinned, wide = torch.ones(64, 64).pin_memory(), torch.ones(64, 128).pin_memory()
    on_device = pinned.to("cuda", non_blocking=True)

    def found(work):
        with watch() as log:
            work()
        return [sync.what for sync in log.found]

    def busy():
        torch.cuda._sleep(100_000_000)

    def event():
        busy()
        mark = torch.cuda.Event()
        mark.record()
        return mark

    assert "wait for an event" in found(lambda: event().synchronize())
    assert "wait for a stream" in found(lambda: (busy(), torch.cuda.current_stream().synchronize()))
    assert "wait for the device" in found(lambda: (busy(), torch.cuda.synchronize()))
    done = event()
    torch.cuda.synchronize()
    assert found(done.synchronize) == []
    assert found(lambda: on_device.copy_(wide[:, ::2], non_blocking=True)) == [
        "copy from cpu to cuda from strided memory"
    ]
    assert found(lambda: wide[:, ::2].copy_(on_device, non_blocking=True)) == [
        "copy from cuda to cpu into strided memory"
    ]
    assert found(lambda: torch.ones(64, 64).copy_(on_device, non_blocking=True)) == [
        "copy from cuda to cpu into memory that is not pinned"
    ]
    assert found(lambda: pinned.copy_(on_device, non_blocking=True)) == []
    assert found(lambda: on_device.to("cpu", non_blocking=True)) == []
    torch.cuda.synchronize()


@pytest.mark.cuda
def test_an_error_of_the_switch_comes_from_torchs_own_warnings_too(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "error")
    x = torch.ones(4, device="cuda")
    torch.cuda._sleep(100_000_000)
    with pytest.raises(SyncFound, match="wait for a stream"), HotPath()():
        torch.cuda.current_stream().synchronize()
    with pytest.raises(SyncFound, match="copy from cuda to cpu"), HotPath()():
        x.cpu()
    torch.cuda.synchronize()


def test_torchs_warning_inside_a_named_wait_is_that_waits():
    with watch() as log:
        with host_waits("a wait of ours"):
            _watching.heard.warn()
        _watching.heard.warn()
    assert [sync.what for sync in log.found] == ["a wait of ours", "a synchronising CUDA call"]


def test_torchs_late_warning_of_a_wait_is_not_another_wait():
    with watch(cpu=True) as log:
        for _ in range(2):
            torch.ones(1).item(), _watching.heard.warn()
        _watching.heard.warn()
    assert [(sync.what, sync.count) for sync in log.found] == [("item()", 2), ("a synchronising CUDA call", 1)]


@pytest.mark.cuda
def test_a_wait_on_cuda_is_reported_once_with_its_line():
    x, pageable = torch.ones(4, device="cuda"), torch.ones(4)
    with watch() as log:
        x.sum().item()
        x[x > 0]
        x.repeat_interleave(x.long())
        x.copy_(pageable, non_blocking=True)
        torch.cuda.synchronize()
    assert all(sync.count == 1 for sync in log.found) and len(log.found) <= 5
    assert {"item()", "a mask as an index", "repeat_interleave() without output_size"} <= {s.what for s in log.found}
    assert all("test_sync_check.py" in sync.stack[0] for sync in log.found)
    assert len({sync.stack for sync in log.found}) == len(log.found)
