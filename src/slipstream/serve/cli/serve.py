"""`slipstream serve`: serves models over an OpenAI-compatible HTTP API."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.base.errors import InvalidOption, ModelNotFound
from slipstream.base.log import set_up_log
from slipstream.checkpoint.locate import default_embedder
from slipstream.config.options import Options, make_options, options_of
from slipstream.metrics.traces import check_tracing
from slipstream.serve.cli.failure import print_failure
from slipstream.serve.cli.flags import add_engine_flags, add_struct_flags
from slipstream.serve.cli.paths import check_paths
from slipstream.serve.cli.sources import Sources
from slipstream.serve.http.hosts import check_hosts
from slipstream.serve.http.settings import ServerSettings

if TYPE_CHECKING:
    from slipstream.serve.cli.run import OpenLLM

# other names of some options, most of them vLLM's
ALIASES = {
    "workers": "api-server-count",
    "max_queued_requests": "max-num-queued-reqs",
    "max_queued_tokens": "max-num-queued-tokens",
    "drain_timeout": "shutdown-timeout",
    "max_inputs": "max-client-batch-size",  # TEI's
    "data_parallel_size": "replicas",  # --replicas, our own
}
LEAST = {
    "workers": 1, "port": 0, "max_queued_requests": 1, "max_queued_tokens": 1, "stream_interval": 1,
    "stream_keep_alive": 0, "drain_timeout": 0, "status_interval": 0, "watchdog_timeout": 0, "max_body_bytes": 1,
    "max_header_bytes": 256, "max_inputs": 1, "max_n": 1, "max_samples": 1, "max_logprobs": 0, "max_stop": 0,
    "max_stop_chars": 1, "max_bias": 0, "max_salt_chars": 0, "max_answer_bytes": 1, "max_bodies_bytes": 1,
    "body_timeout": 0.001, "max_file_bytes": 1, "max_store_bytes": 1,
    "max_stored_responses": 0, "max_stored_response_bytes": 0,
}  # fmt: skip


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "serve",
        help="serve models over HTTP",
        description="Serves models over an OpenAI-compatible HTTP API. Requests choose a model by name, which "
        "NAME=PATH sets. Without a model it serves the default chat model and the default embedder. Each flag can also "
        "be set in the environment (SLIPSTREAM_API_KEY, separated by commas), where other users of the machine cannot "
        "read it, or in a YAML file (--config). Flags override the environment, which overrides the file.",
        usage="slipstream serve [MODEL ...] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("models", nargs="*", metavar="MODEL", help="a model as for --model, or NAME=MODEL; repeatable")
    command.add_argument("--config", metavar="FILE", help="YAML file of options, for example max-model-len: 8192")
    add_struct_flags(command, "server", ServerSettings, aliases=ALIASES)
    add_engine_flags(command, aliases=ALIASES)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    given = Sources((ServerSettings, Options), ALIASES).gather(args, os.environ)
    as_json = given.get("log_format") == "json"
    try:
        of_server = {name: given.pop(name) for name in ServerSettings.__struct_fields__ if name in given}
        settings = server_settings(dict(of_server))
        if settings.replica_urls:
            return _run_proxy(settings, [*of_server, *(name for name in given if given[name] != [])])
        if settings.prefill_urls:
            raise InvalidOption("prefill_urls are for a server that passes requests on; give replica_urls too")
        options = model_options(given.pop("models", []), given)
        for each in options:
            check_paths(each)
        from slipstream.serve.http.launch import launch  # not needed for --help and errors

        set_up_log(settings.log_level, settings.log_format)
        launch(settings, options)
    except Exception as error:
        if not as_json:
            raise
        return print_failure(error, as_json=True)
    return 0


# settings that apply to a server that only passes requests on
_OF_PROXY = (
    "replica_urls", "prefill_urls", "host", "port", "uds", "ssl_certfile", "ssl_keyfile", "log_level", "log_format",
    "max_body_bytes", "max_header_bytes",
)  # fmt: skip


def _run_proxy(settings: ServerSettings, given: list[str]) -> int:
    """Passes requests on to `replica_urls`. `given`: names of all options that were given."""
    if wrong := next((name for name in given if name not in _OF_PROXY), None):
        raise InvalidOption(
            f"replica_urls and {wrong} are given; this server only passes requests on, so give {wrong} to the servers "
            "themselves"
        )
    from slipstream.serve.http.launch import launch_proxy

    set_up_log(settings.log_level, settings.log_format)
    launch_proxy(settings)
    return 0


def server_settings(given: dict[str, Any]) -> ServerSettings:
    for name in ("allowed_hosts", "allowed_origins", "allowed_methods", "allowed_headers"):
        if name in given:
            given[name] = [each for text in given[name] for each in _listed(name, text)]
    settings = ServerSettings(**given)
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidOption(f"{name} is {value}; give a finite number")
    for name, least in LEAST.items():
        if (value := getattr(settings, name)) < least:
            raise InvalidOption(f"{name} is {value}; give {least} or more")
    if settings.request_timeout is not None and settings.request_timeout <= 0:
        raise InvalidOption(f"request_timeout is {settings.request_timeout}; give more than 0, or remove it")
    check_hosts(settings.allowed_hosts)
    if settings.reasoning_parser or settings.tool_call_parser:
        from slipstream.parsers.families import check_parsers  # not needed for --help

        check_parsers(settings.reasoning_parser, settings.tool_call_parser)
    if settings.ssl_certfile or settings.ssl_keyfile:
        from slipstream.serve.http.tls import server_context  # imports OpenSSL

        server_context(settings)
    if settings.allow_credentials and "*" in settings.allowed_origins:
        raise InvalidOption(
            "allowed_origins is * and allow_credentials is set, so that every web page could use its visitor's "
            "cookies; list the origins, or remove allow_credentials"
        )
    if settings.port > 65535:
        raise InvalidOption(f"port is {settings.port}; give 0 to 65535")
    if settings.otlp_traces_endpoint is not None:
        check_tracing(settings.otlp_traces_endpoint)
    if any(not key.strip() for key in (*settings.api_key, settings.admin_key or "-")):
        raise InvalidOption("an API key is empty; give a key, or remove it")
    return settings


def _listed(name: str, text: str) -> list[str]:
    """Returns one entry, or those of a JSON list, which is vLLM's format."""
    if not text.startswith("["):
        return [text]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError:
        raise InvalidOption(f'{name} is {text!r}, which is not a JSON list; write ["a", "b"]') from None


def model_options(models: list[str] | dict[str, Any], given: dict[str, Any]) -> list[Options]:
    """Returns one set of options per model. They differ in model and name, and in a file's options of each model."""
    if isinstance(models, dict):
        if "model" in given or "served_model_name" in given:
            raise InvalidOption("models is given with model or served_model_name; remove one of them")
        return options_of(None, models, given)
    if "model" in given:
        if models:
            raise InvalidOption(f"MODEL {models[0]} and --model {given['model']} are both given; remove one of them")
        models = [given.pop("model")]
    if not models:
        return _default_models(given)
    if len(models) > 1 and "served_model_name" in given:
        raise InvalidOption("served_model_name is one name and there are several models; give NAME=MODEL instead")
    return [make_options(**{**given, **_named(model)}) for model in models]


# options that apply to both default models; the others are for the chat model
_SHARED_OPTIONS = (
    "device", "dtype", "num_threads", "depth", "max_itl", "enforce_eager", "deterministic", "max_waiting", "seed",
    "data_parallel_size", "distributed_executor_backend", "enable_sleep_mode",
)  # fmt: skip


def _default_models(given: dict[str, Any]) -> list[Options]:
    """Returns the options of the default chat model and embedder, or of the default model for the given task."""
    options = [make_options(**given)]
    if given.get("task", "auto") == "auto":
        try:
            default_embedder()
        except ModelNotFound:
            return options  # the embedder is not installed
        own = {name: given[name] for name in _SHARED_OPTIONS if name in given}
        options.append(make_options(task="embed", **own))
    return options


def _named(model: str) -> dict[str, Any]:
    name, equals, path = model.partition("=")
    if not equals or Path(model).exists():
        return {"model": model}
    if not name or not path:
        raise InvalidOption(f"{model!r} has no model; give MODEL or NAME=MODEL")
    return {"model": path, "served_model_name": name}
