"""`slipstream serve`: flags to settings and options, before anything starts."""

from __future__ import annotations

import json
import os

import pytest

from slipstream.base.errors import InvalidOption
from slipstream.checkpoint import locate
from slipstream.config.options import Options, make_options
from slipstream.serve.cli import serve
from slipstream.serve.http.launch import without_images
from slipstream.serve.http.server.settings import ServerSettings


@pytest.fixture
def default_models(tmp_path, monkeypatch):
    """Packages of a chat model and of an embedder, so that it does not matter which ones are installed here."""
    packages = tmp_path / "packages"
    (packages / "some_chat_model").mkdir(parents=True)
    (packages / "some_chat_model" / "chat.gguf").touch()
    (packages / "some_embedder" / "model").mkdir(parents=True)
    (packages / "some_embedder" / "model" / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(locate, "DEFAULT_PACKAGE", "some_chat_model")
    monkeypatch.setattr(locate, "EMBEDDER_PACKAGE", "some_embedder")


@pytest.fixture
def told(terminal, default_models, monkeypatch):
    """Runs `serve` and returns the arguments of the launcher, or the last line of the mistake."""
    for name in [name for name in os.environ if name.startswith("SLIPSTREAM_")]:
        monkeypatch.delenv(name)
    seen = []
    monkeypatch.setattr(
        "slipstream.serve.http.launch.launch", lambda settings, options: seen.append((settings, options))
    )
    monkeypatch.setattr("slipstream.serve.cli.serve.set_up_log", lambda *args: None)

    def run(*argv: str) -> tuple[ServerSettings, list[Options]] | str:
        code, _, err = terminal.run("serve", *argv)
        assert (code == 0) == bool(seen), err
        return seen.pop() if seen else err.splitlines()[-1]

    return run


def test_the_defaults_are_the_default_models_on_loopback(told):
    settings, options = told()
    assert settings == ServerSettings() and settings.host == "127.0.0.1"
    assert options == [Options(), Options(task="embed")]


def test_flags_without_a_model_are_the_chat_models_but_for_those_about_the_machine(told, monkeypatch):
    flags = ("--max-model-len", "512", "--served-model-name", "mine", "--dtype", "float32", "--num-threads", "1")
    _, (chat, embedder) = told(*flags)
    assert (chat.max_model_len, chat.served_model_name, chat.dtype, chat.num_threads) == (512, "mine", "float32", 1)
    assert embedder == Options(task="embed", dtype="float32", num_threads=1)
    assert told("--task", "embed")[1] == [Options(task="embed")]
    assert all(each.enable_sleep_mode for each in told("--enable-sleep-mode")[1])  # models of a server sleep together

    monkeypatch.setattr(locate, "EMBEDDER_PACKAGE", "no_such_package")
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
    (odd / "config.json").write_text("{}")
    _, options = told("chat=org/one", "org/two", str(odd), "--max-num-seqs", "4")
    assert [(o.model, o.served_model_name) for o in options] == [
        ("org/one", "chat"),
        ("org/two", None),
        (str(odd), None),
    ]
    assert all(o.max_num_seqs == 4 for o in options)


def test_every_flag_may_come_from_the_environment(told, monkeypatch):
    for name, text in {
        "PORT": "9", "WORKERS": "3", "ALLOWED_ORIGINS": "https://a,https://b", "ALLOW_CREDENTIALS": "yes",
        "MAX_MODEL_LEN": "auto", "ENABLE_PREFIX_CACHING": "false", "GPU_MEMORY_UTILIZATION": "0.5", "HOST": "",
        "MODEL": "some/model", "SHUTDOWN_TIMEOUT": "5", "API_SERVER_COUNT": "2", "KV_CACHE_MEMORY": "2GiB",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"SLIPSTREAM_{name}", text)
    settings, (options,) = told("--api-server-count", "4")
    assert (settings.port, settings.workers, settings.drain_timeout, settings.host) == (9, 4, 5.0, "127.0.0.1")
    assert settings.allowed_origins == ["https://a", "https://b"] and settings.allow_credentials
    assert (options.model, options.max_model_len, options.enable_prefix_caching) == ("some/model", "auto", False)
    assert (options.gpu_memory_utilization, options.kv_cache_memory) == (0.5, "2GiB")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("PROT", "8000", "there is no option SLIPSTREAM_PROT; did you mean SLIPSTREAM_PORT?"),
        ("PORT", "many", "SLIPSTREAM_PORT is 'many'; it takes a whole number"),
        ("DTYPE", "int8", "SLIPSTREAM_DTYPE is 'int8'; it takes 'auto' or"),
        ("ALLOW_CREDENTIALS", "maybe", "SLIPSTREAM_ALLOW_CREDENTIALS is 'maybe'; it takes true or false"),
        ("PORT", "99999", "port is 99999; give 0 to 65535"),
        ("REQUEST_TIMEOUT", "nan", "--request-timeout is nan"),
        ("UDS", "/tmp/s", "uds and port are both given"),
    ],
)
def test_a_mistake_in_the_environment_is_named(told, monkeypatch, name, text, words):
    monkeypatch.setenv(f"SLIPSTREAM_{name}", text)
    if name == "UDS":
        monkeypatch.setenv("SLIPSTREAM_PORT", "1")
    assert words in told()


def test_what_kubernetes_puts_into_the_environment_is_not_ours(told, monkeypatch):
    """Of a service called slipstream."""
    for name, text in {
        "PORT": "tcp://10.0.0.1:8000", "SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "8000", "SERVICE_PORT_HTTP": "8000",
        "PORT_8000_TCP": "tcp://10.0.0.1:8000", "PORT_8000_TCP_ADDR": "10.0.0.1", "PORT_8000_TCP_PROTO": "tcp",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"SLIPSTREAM_{name}", text)
    assert told("some/model")[0].port == 8000


def test_a_file_of_options_counts_less_than_the_environment_and_that_less_than_flags(told, monkeypatch, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nhost: 0.0.0.0\nmax-model-len: 512\nmax_num_seqs: 3\nmodel: from/file\nseed:\n")
    settings, (options,) = told("--config", str(file))
    assert (settings.port, settings.host) == (1, "0.0.0.0")
    assert (options.model, options.max_model_len, options.max_num_seqs) == ("from/file", 512, 3)
    monkeypatch.setenv("SLIPSTREAM_CONFIG", str(file))
    monkeypatch.setenv("SLIPSTREAM_PORT", "2")
    monkeypatch.setenv("SLIPSTREAM_MAX_MODEL_LEN", "256")
    monkeypatch.setenv("SLIPSTREAM_MODEL", "from/environment")
    settings, (options,) = told("--max-model-len", "128")
    assert (settings.port, options.max_model_len, options.max_num_seqs) == (2, 128, 3)
    assert options.model == "from/environment"
    _, (first, second) = told("a=from/flags", "two/flags")
    assert (first.model, first.served_model_name, second.model) == ("from/flags", "a", "two/flags")


def test_a_unix_socket_counts_before_a_port_of_a_later_source(told, tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\n")
    settings, _ = told("m/m", "--config", str(file), "--uds", "/tmp/s")
    assert (settings.uds, settings.port) == ("/tmp/s", 8000)
    file.write_text("uds: /tmp/s\n")
    settings, _ = told("m/m", "--config", str(file), "--port", "5")
    assert (settings.uds, settings.port) == (None, 5)


def test_a_file_may_give_models_by_name_with_options_of_their_own(told, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("models:\n  chat: org/one\n  embed: {model: org/two, max_model_len: 64}\nseed: 7\n")
    _, (chat, embed) = told("--config", str(file))
    assert (chat.model, chat.served_model_name, chat.seed, chat.max_model_len) == ("org/one", "chat", 7, None)
    assert (embed.model, embed.served_model_name, embed.max_model_len) == ("org/two", "embed", 64)
    file.write_text("models: [org/one, b=org/two]\n")
    assert [each.model for each in told("--config", str(file))[1]] == ["org/one", "org/two"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 8000", "there is no option prot in {file}; did you mean port?"),
        ("port: many", "{file}: port is 'many'; it takes a whole number"),
        ("port: true", "{file}: port is True; it takes a whole number"),
        ("api_key: [1]", "{file}: --api-key is [1]; it takes a list of strings"),
        ("port: 1\nport: 2", "{file} has port twice"),
        ("workers: 1\napi-server-count: 2", "has workers twice"),
        ("- port", "{file} has a list; give lines like"),
        ("port: [", "which is not valid YAML"),
        ("request_timeout: .nan", "--request-timeout is nan"),
        ("models: {a: {prot: 1}}", "there is no option prot"),
        ("model: a/b\nmodels: [c/d]", "remove one of them"),
        ("uds: /tmp/s\nhost: a", "uds and host are both given"),
    ],
)
def test_a_mistake_in_a_file_is_named(told, tmp_path, text, words):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert words.format(file=file) in told("--config", str(file))


def test_a_file_that_is_not_there_is_named(told, tmp_path):
    assert "cannot be read" in told("--config", str(tmp_path / "none.yaml"))


def test_a_missing_path_is_reported_before_anything_starts(told, tmp_path):
    assert f"there is no {tmp_path}/none here" in told(f"{tmp_path}/none")
    assert "there is no ./no-such-model here" in told("chat=./no-such-model")
    assert "neither config.json nor a .gguf file" in told(str(tmp_path))
    assert "there is no tokenizer at" in told("some/model", "--tokenizer", str(tmp_path / "none.json"))
    assert "neither a template nor a readable file" in told(
        "some/model", "--chat-template", str(tmp_path / "none.jinja")
    )
    (tmp_path / "file.txt").write_text("")
    assert "not a .gguf one" in told(str(tmp_path / "file.txt"))


def test_an_adapter_that_cannot_load_is_reported_before_anything_starts(told, tmp_path):
    def error(*flags: str) -> str:
        return told("some/model", "--enable-lora", "--lora-modules", f"sql={tmp_path}/sql", *flags)

    assert f"the adapter sql of --lora-modules: {tmp_path}/sql has no adapter_config.json" in error()
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql/adapter_config.json").write_text('{"peft_type": "LORA", "r": 32, "lora_alpha": 8}')
    assert "has rank 32, and the engine takes up to 16; raise --max-lora-rank" in error()
    assert not isinstance(error("--max-lora-rank", "32"), str)


@pytest.mark.parametrize("argv", [("--port", "70000"), ("--prot", "1"), ("--port", "x"), ("./none",)], ids=str)
@pytest.mark.parametrize("how", ["flag", "environment", "file"])
def test_the_fatal_line_is_json_where_the_log_is(terminal, monkeypatch, tmp_path, argv, how):
    if how == "flag":
        argv = ("--log-format", "json", *argv)
    elif how == "environment":
        monkeypatch.setenv("SLIPSTREAM_LOG_FORMAT", "json")
    elif argv[1:] not in (("1",), ("x",)):  # those end before a file is read
        (tmp_path / "serve.yaml").write_text("log_format: json")
        argv = ("--config", str(tmp_path / "serve.yaml"), *argv)
    else:
        return
    code, _, err = terminal.run("serve", *argv)
    (line,) = err.splitlines()
    said = json.loads(line)
    assert code == 2 and said["level"] == "critical" and said["message"]


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
        (("a", "--model", "b"), "remove one of them"),
        (("a", "b", "--served-model-name", "c"), "NAME=MODEL"),
        (("--log-level", "loud"), "invalid choice"),
        (("--max-body-bytes", "many"), "whole number"),
        (("--dtype", "int8"), "invalid choice"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(told, argv, words):
    assert words in told(*argv)


@pytest.mark.parametrize(
    "given",
    [
        {"limit_mm_per_prompt": {"image": 1}},
        {"limit_mm_per_prompt": '{"image": 2}'},
        {"mm_processor_kwargs": {"max_pixels": 784}},
        {"allowed_media_domains": ["*"]},
        {"allowed_local_media_path": "/"},
    ],
)
def test_options_of_images_are_refused_by_a_server_and_no_tower_is_loaded(given):
    with pytest.raises(InvalidOption, match=f"{next(iter(given))} is for images"):
        without_images(make_options(model="m", **given))
    for limit in (None, {"image": 0}, '{"image": 0}'):
        assert without_images(make_options(model="m", limit_mm_per_prompt=limit)).limit_mm_per_prompt == {"image": 0}


def test_every_bound_has_a_least_value():
    numbers = [
        name for name in ServerSettings.__struct_fields__ if type(getattr(ServerSettings(), name)) in (int, float)
    ]
    assert set(numbers) == set(serve.LEAST)


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parsers_are_refused_at_the_start(name):
    with pytest.raises(InvalidOption, match=f"{name} is 'x'; give one of"):
        serve.server_settings({name: "x"})
    assert getattr(serve.server_settings({name: "none"}), name) == "none"
