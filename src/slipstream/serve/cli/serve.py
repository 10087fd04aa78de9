"""`slipstream serve`: serves models over an OpenAI-compatible HTTP API."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from slipstream.base.errors import InvalidOption, ModelNotFound
from slipstream.base.log import set_up_log
from slipstream.checkpoint.locate import default_embedder
from slipstream.config.options import Options, describe_type, make_options, options_of
from slipstream.metrics.stats import check_tracing
from slipstream.serve.cli.failure import print_failure
from slipstream.serve.cli.flags import add_engine_flags, add_struct_flags, alternatives, check_paths, read_text
from slipstream.serve.http.server.access import check_hosts
from slipstream.serve.http.server.settings import ServerSettings

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
    "allowed_hosts", "max_body_bytes", "max_bodies_bytes", "max_header_bytes", "body_timeout",
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
        from slipstream.serve.http.server.listen import server_context  # imports OpenSSL

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


# The sources of the options of `serve`: flags, then the environment, then a file, then defaults.
#
# An option has the same name in all of them: --max-model-len, SLIPSTREAM_MAX_MODEL_LEN, `max_model_len:` (or
# `max-model-len:`) in the file of --config. An unknown name is an error in each of them.

PREFIX = "SLIPSTREAM_"
_OTHER_VARIABLES = {"CONFIG", "NATIVE", "SYNC_CHECK", "PARENT_PID"}  # not options of `serve`
# variables that Kubernetes sets in every container of a namespace with a service called slipstream
_FROM_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?")
_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


# if a source has one of the first options, later sources cannot set the second ones
_EXCLUSIVE = (({"model", "models"}, {"model", "models"}), ({"uds"}, {"host", "port"}), ({"host", "port"}, {"uds"}))


class Sources:
    """Reads options with their types from all sources."""

    def __init__(self, structs: Sequence[type[msgspec.Struct]], aliases: Mapping[str, str]) -> None:
        """`aliases`: other names of some options, in the spelling of flags."""
        self._kinds: dict[str, Any] = {"models": list[str] | dict[str, Any]}
        for struct in structs:
            for name, hint in get_type_hints(struct, include_extras=True).items():
                self._kinds[name] = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        self._aliases = {alias.replace("-", "_"): name for name, alias in aliases.items()}

    def gather(self, args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
        """Returns the given options, each from the first source that has it. `models` has the named models."""
        flags = {name: getattr(args, name) for name in self._kinds if hasattr(args, name)}
        if not flags["models"]:
            del flags["models"]
        path = getattr(args, "config", None) or environ.get(f"{PREFIX}CONFIG") or None
        sources = [flags, self.environment(environ), {} if path is None else self.file(path)]
        found: dict[str, Any] = {}
        for source in sources:
            _check_listen_address(source)
            for names, others in _EXCLUSIVE:
                if found.keys() & names:
                    source = {name: value for name, value in source.items() if name not in others}
            found = source | found
        return found

    def environment(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """Reads environment variables. An empty one counts as unset."""
        found: dict[str, Any] = {}
        for key, text in environ.items():
            short = key.removeprefix(PREFIX)
            if short == key or not text or short in _OTHER_VARIABLES or _FROM_KUBERNETES.fullmatch(short):
                continue
            if short == "PORT" and text.startswith("tcp://"):
                continue  # set by Kubernetes
            name = self._known(short.lower(), key, lambda near: PREFIX + near.upper())
            found[name] = self._read(name, key, text)
        return found

    def file(self, path: str) -> dict[str, Any]:
        given = _load(path)
        found: dict[str, Any] = {}
        for key, value in given.items():
            if not isinstance(key, str):
                raise InvalidOption(f"{path} has the key {key!r}; give names of options")
            name = self._known(key.replace("-", "_"), f"{key} in {path}", str)
            if name in found:
                raise InvalidOption(f"{path} has {name} twice, under two names; remove one")
            if value is not None:
                found[name] = self._convert(name, f"{path}: {key}", value)
        return found

    def _known(self, name: str, shown: str, show: Any) -> str:
        name = self._aliases.get(name, name)
        if name not in self._kinds:
            near = difflib.get_close_matches(name, self._kinds, n=1)
            hint = f"did you mean {show(near[0])}?" if near else "slipstream serve --help lists the options"
            raise InvalidOption(f"there is no option {shown}; {hint}")
        return name

    def _read(self, name: str, key: str, text: str) -> Any:
        """Converts a variable's text to the option's type. A list is separated by commas, or is a JSON list."""
        kinds = alternatives(self._kinds[name])
        if list[str] in kinds or list[Any] in kinds:
            return _listed_sources(text)
        if kinds == [bool]:
            if text.lower() not in _TRUTH:
                raise InvalidOption(f"{key} is {text!r}; it takes true or false")
            return _TRUTH[text.lower()]
        try:
            return read_text(self._kinds[name], text)
        except ValueError:
            wanted = " or ".join(describe_type(kind) for kind in kinds)
            raise InvalidOption(f"{key} is {text!r}; it takes {wanted}") from None

    def _convert(self, name: str, shown: str, value: Any) -> Any:
        kind = self._kinds[name]
        if name == "models" and isinstance(value, dict):
            value = {str(each): _with_names(given) for each, given in value.items()}
        if {list[str], list[Any]} & set(alternatives(kind)) and isinstance(value, str):
            value = [value]
        try:
            return msgspec.convert(value, kind, strict=True)
        except (msgspec.ValidationError, UnicodeEncodeError):
            wanted = " or ".join(describe_type(each) for each in alternatives(kind))
            raise InvalidOption(f"{shown} is {value!r}; it takes {wanted}") from None


def _listed_sources(text: str) -> list[str]:
    if text.startswith("["):
        try:
            return msgspec.json.decode(text, type=list[str])
        except msgspec.MsgspecError:
            pass  # an API key may begin with a bracket
    return [each for each in text.split(",") if each]


def _with_names(given: Any) -> Any:
    """The options of one model, with underscores in their names."""
    return {str(name).replace("-", "_"): value for name, value in given.items()} if isinstance(given, dict) else given


def _check_listen_address(source: Mapping[str, Any]) -> None:
    for name in ("host", "port"):
        if "uds" in source and name in source:
            raise InvalidOption(f"uds and {name} are both given; remove one: a server has a unix socket or a port")


def _load(path: str) -> dict[Any, Any]:
    import yaml  # type: ignore[import-untyped]  # not needed for --help

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Raises for duplicate keys, of which PyYAML would take the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise InvalidOption(f"{path} has {key} twice; remove one")
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        given = Loader(Path(path).expanduser().read_text(encoding="utf-8")).get_single_data()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"config is {path}, which cannot be read: {error}; give a YAML file") from None
    except yaml.YAMLError as error:
        raise InvalidOption(f"config is {path}, which is not valid YAML: {' '.join(str(error).split())}") from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidOption(f"{path} has a {type(given).__name__}; give lines like port: 8000")
    return given
