"""`slipstream serve`: flags to settings and options, before anything starts."""

from __future__ import annotations

import pytest

from slipstream.config.options import Options
from slipstream.errors import ModelNotFound
from slipstream.serve.cli import serve
from slipstream.serve.http.settings import Settings


@pytest.fixture
def told(terminal, monkeypatch):
    """Runs `serve` and returns what the launcher is told, or the last line of the mistake."""
    monkeypatch.delenv("SLIPSTREAM_API_KEY", raising=False)
    monkeypatch.delenv("SLIPSTREAM_ADMIN_KEY", raising=False)
    seen = []
    monkeypatch.setattr(
        "slipstream.serve.http.launch.launch", lambda settings, options: seen.append((settings, options))
    )
    monkeypatch.setattr("slipstream.serve.http.log.set_up_log", lambda *args: None)

    def run(*argv: str) -> tuple[Settings, list[Options]] | str:
        code, _, err = terminal.run("serve", *argv)
        assert (code == 0) == bool(seen), err
        return seen.pop() if seen else err.splitlines()[-1]

    return run


def test_nothing_said_is_the_default_models_on_loopback(told, monkeypatch):
    monkeypatch.setattr(serve, "default_embedder", lambda: None)
    settings, options = told()
    assert settings == Settings() and settings.host == "127.0.0.1"
    assert options == [Options(), Options(task="embed")]


def test_flags_without_a_model_are_the_chat_models_but_for_those_about_the_machine(told, monkeypatch):
    monkeypatch.setattr(serve, "default_embedder", lambda: None)
    flags = ("--max-model-len", "512", "--served-model-name", "mine", "--dtype", "float32", "--num-threads", "1")
    _, (chat, embedder) = told(*flags)
    assert (chat.max_model_len, chat.served_model_name, chat.dtype, chat.num_threads) == (512, "mine", "float32", 1)
    assert embedder == Options(task="embed", dtype="float32", num_threads=1)
    assert told("--task", "embed")[1] == [Options(task="embed")]

    def absent():
        raise ModelNotFound("not installed")

    monkeypatch.setattr(serve, "default_embedder", absent)
    assert told()[1] == [Options()]


def test_flags_and_what_others_call_them(told):
    settings, (options,) = told(
        "some/model", "--host", "0.0.0.0", "--port", "9", "--api-key", "a", "--api-key", "b", "--api-server-count", "3",
        "--max-model-len", "512", "--served-model-name", "mine", "--shutdown-timeout", "5",
        "--max-num-queued-reqs", "7", "--gpu-memory-utilization", "0.5", "--dtype", "float32",
    )  # fmt: skip
    assert (settings.host, settings.port, settings.workers, settings.api_key) == ("0.0.0.0", 9, 3, ["a", "b"])
    assert (settings.drain_timeout, settings.max_queued_requests) == (5.0, 7)
    assert (options.model, options.max_model_len, options.served_model_name) == ("some/model", 512, "mine")
    assert (options.gpu_memory_utilization, options.dtype) == (0.5, "float32")


def test_several_models_by_name(told, tmp_path):
    odd = tmp_path / "a=b"
    odd.mkdir()
    _, options = told("chat=org/one", "org/two", str(odd), "--max-num-seqs", "4")
    assert [(o.model, o.served_model_name) for o in options] == [
        ("org/one", "chat"),
        ("org/two", None),
        (str(odd), None),
    ]
    assert all(o.max_num_seqs == 4 for o in options)


def test_keys_from_the_environment(told, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "a,b")
    monkeypatch.setenv("SLIPSTREAM_ADMIN_KEY", "root")
    settings, _ = told()
    assert settings.api_key == ["a", "b"] and settings.admin_key == "root"
    assert told("--api-key", "c")[0].api_key == ["c"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--workers", "0"), "give 1 or more"),
        (("--port", "70000"), "0 to 65535"),
        (("--request-timeout", "0"), "more than 0"),
        (("--request-timeout", "nan"), "--request-timeout is nan; give a finite number"),
        (("--request-timeout", "inf"), "--request-timeout is inf; give a finite number"),
        (("--drain-timeout", "nan"), "--drain-timeout is nan"),
        (("--stream-keep-alive", "nan"), "--stream-keep-alive is nan"),
        (("--status-interval", "inf"), "--status-interval is inf"),
        (("--watchdog-timeout", "nan"), "--watchdog-timeout is nan"),
        (("--max-itl", "nan"), "max-itl is nan"),
        (("--gpu-memory-utilization", "nan"), "gpu-memory-utilization is nan"),
        (("--api-key", " "), "key is empty"),
        (("=x",), "NAME=MODEL"),
        (("a", "--model", "b"), "give one of them"),
        (("a", "b", "--served-model-name", "c"), "NAME=MODEL"),
        (("--log-level", "loud"), "invalid choice"),
        (("--max-body-bytes", "many"), "whole number"),
        (("--dtype", "int8"), "invalid choice"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(told, argv, words):
    assert words in told(*argv)


def test_every_bound_has_a_least_value():
    numbers = [name for name in Settings.__struct_fields__ if type(getattr(Settings(), name)) in (int, float)]
    assert set(numbers) == set(serve.LEAST)
