"""The sources of the options of `serve`: flags, then the environment, then a file, then defaults.

An option has the same name in all of them: --max-model-len, SLIPSTREAM_MAX_MODEL_LEN, `max_model_len:` (or
`max-model-len:`) in the file of --config. An unknown name is an error in each of them.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.config.options import describe_type
from slipstream.serve.cli.flags import alternatives, read_text

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
            return _listed(text)
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


def _listed(text: str) -> list[str]:
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
