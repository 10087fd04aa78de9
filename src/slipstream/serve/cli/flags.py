"""Generates command-line flags from `Options` and `SamplingParams`, so that an option is described in one place.

A flag that is not given is absent from the result, so that `config/resolve.py` sets its default.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from slipstream.base.errors import BadTokenizer, UserError
from slipstream.checkpoint.locate import check_model, locate
from slipstream.config.adapter_config import check_lora_modules
from slipstream.config.options import Options, describe_type
from slipstream.params.sampling import FLAG, PARAMS, SamplingParams, names_for

if TYPE_CHECKING:
    pass


SAMPLING = names_for(FLAG)  # without `seed`, the engine's flag, which makes a whole run repeatable

# Flags of the engine, the server and sampling that --help shows; `--help all` shows the others too.
COMMON = frozenset((
    "model", "max_model_len", "max_num_seqs", "kv_cache_memory", "temperature", "top_p", "max_tokens", "host", "port",
    "api_key", "log_level",
))  # fmt: skip
LONG_GROUPS = ("engine", "server", "sampling")


def add_engine_flags(
    parser: argparse.ArgumentParser, *, aliases: Mapping[str, str] = {}, leave_out: Iterable[str] = ()
) -> None:
    """Adds a flag for every field of Options."""
    add_struct_flags(parser, "engine", Options, aliases=aliases, leave_out=leave_out)


def add_struct_flags(
    parser: argparse.ArgumentParser,
    title: str,
    struct: type[msgspec.Struct],
    *,
    aliases: Mapping[str, str] = {},
    leave_out: Iterable[str] = (),
) -> None:
    """Adds a flag for every field, from its annotation. `aliases`: names of some of them in other programs."""
    group = parser.add_argument_group(title)
    for name, kind, text, default in _described_fields(struct):
        if name not in leave_out:
            _add_flag(group, name, kind, text, default, aliases.get(name))


@cache  # most subcommands have the engine's flags, and Python evaluates each annotation anew
def _described_fields(struct: type[msgspec.Struct]) -> list[tuple[str, Any, str, Any]]:
    """Returns name, type, description and default of every field."""
    hints = get_type_hints(struct, include_extras=True)
    found = []
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        assert get_origin(hint) is Annotated, f"{struct.__name__}.{field.name} has no description"
        kind, meta = get_args(hint)
        found.append((field.name, kind, meta.description, field.default))
    return found


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the engine options that are given."""
    return _given(args, Options.__struct_fields__)


def add_sampling_flags(
    parser: argparse.ArgumentParser, *, max_tokens: int | None, names: Iterable[str] = SAMPLING
) -> None:
    """Adds flags for these fields. Without `max_tokens` there is no default for it."""
    group = parser.add_argument_group("sampling", "Defaults are those of the model's generation_config.json.")
    hints = _sampling_types()
    for name in names:
        text = PARAMS[name].help
        if name == "stop":
            text = "a string that stops generation; repeatable"
            group.add_argument("--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS, help=text)
        else:
            _add_flag(group, name, hints[name], text, max_tokens if name == "max_tokens" else None)
    if max_tokens is not None:
        parser.set_defaults(max_tokens=max_tokens)


def read_sampling(name: str, text: str) -> Any:
    """The value of a sampling parameter from a text. Raises UserError."""
    if name not in SAMPLING:
        near = difflib.get_close_matches(name, SAMPLING, n=1)
        raise UserError(f"there is no parameter {name}; give {near[0] if near else 'one of ' + ', '.join(SAMPLING)}")
    kind = _sampling_types()[name]
    if bool in alternatives(kind):
        kind = Literal["true", "false"]
    try:
        value = read_text(str if name == "stop" else kind, text)
    except ValueError:
        wanted = " or ".join(describe_type(member) for member in alternatives(kind))
        raise UserError(f"{name} is {text!r}; it takes {wanted}") from None
    return {"true": True, "false": False}.get(value, value) if kind == Literal["true", "false"] else value


@cache
def _sampling_types() -> dict[str, Any]:
    return get_type_hints(SamplingParams)


def sampling_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the sampling parameters that are given, which override the model's defaults."""
    return _given(args, (*SAMPLING, "n"))


def _add_flag(
    group: argparse._ArgumentGroup, name: str, kind: Any, text: str, default: Any, alias: str | None = None
) -> None:
    flags = ["--" + name.replace("_", "-"), *([f"--{alias}"] if alias else [])]
    text = text.replace("%", "%%")
    if default not in (None, msgspec.NODEFAULT):
        text += f" (default: {_shown(default)})"
    kinds = alternatives(kind)
    if kinds in ([list[str]], [list[Any]]):
        group.add_argument(*flags, action="append", metavar="TEXT", default=argparse.SUPPRESS, help=text)
    elif kinds == [bool]:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    elif len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        group.add_argument(*flags, choices=get_args(kinds[0]), default=argparse.SUPPRESS, help=text)
    else:
        group.add_argument(*flags, type=_reader(kind), metavar=_metavar(kinds), default=argparse.SUPPRESS, help=text)


def alternatives(kind: Any) -> list[Any]:
    """Returns the members of a union without None, which is the absence of the flag."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [member for member in members if member is not NoneType]


def _reader(kind: Any) -> Callable[[str], Any]:
    """Returns a parser of a flag's text, with an error that lists what it takes."""

    def read(text: str) -> Any:
        try:
            return read_text(kind, text)
        except ValueError:
            wanted = " or ".join(describe_type(member) for member in alternatives(kind))
            raise argparse.ArgumentTypeError(f"{text!r} given; it takes {wanted}") from None

    return read


def read_text(kind: Any, text: str) -> Any:
    """Converts a text to the first member of the union that accepts it. Raises ValueError if none does."""
    for member in alternatives(kind):
        if get_origin(member) is Literal:
            if text in get_args(member):
                return text
            continue
        try:
            return member(text)
        except ValueError:
            continue
    raise ValueError(text)


def _metavar(kinds: list[Any]) -> str:
    names = {int: "N", float: "X", str: "TEXT"}
    if any(get_origin(kind) is dict for kind in kinds):
        return "JSON"
    return "|".join("|".join(get_args(kind)) if get_origin(kind) is Literal else names[kind] for kind in kinds)


def _shown(default: Any) -> str:
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


# Checks the paths in options before torch is imported.


def check_paths(options: Options, *, look_up: bool = False) -> None:
    """Raises for a model, a tokenizer, a chat template or an adapter that does not exist.

    A hub name is not checked unless `look_up`, which may download the model.
    """
    if look_up:
        locate(options.model, options.revision, options.task, options.download_dir)
    else:
        check_model(options.model, options.task)
    if options.tokenizer is not None and not Path(options.tokenizer).expanduser().exists():
        raise BadTokenizer(f"there is no tokenizer at {options.tokenizer}; give a folder or a tokenizer.json")
    if options.chat_template is not None:
        from slipstream.text.chat_template import load_chat_template

        load_chat_template(options.chat_template)
    check_lora_modules(options)


# Sets up the standard streams: all are open, and pipes and files use UTF-8 in any locale.


def set_up_streams() -> None:
    """Replaces a closed stream by the null device, so that no socket or file gets its descriptor. Output to a pipe or a
    file is UTF-8; a terminal keeps its encoding, with escapes for characters that it lacks."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, _null(number, mode))
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        if out.isatty():
            out.reconfigure(errors="backslashreplace")
        else:
            out.reconfigure(encoding="utf-8", errors="surrogateescape")


def _null(number: int, mode: str) -> IO[str]:
    try:
        os.fstat(number)
    except OSError:  # the descriptor is free
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        return open(number, mode, encoding="utf-8", closefd=False)
    return open(os.devnull, mode, encoding="utf-8")


def read_stdin(*, of_terminal: bool = False) -> str | None:
    """Returns the text of standard input; None if that is a terminal, unless `of_terminal`."""
    source = sys.stdin
    if source.isatty():
        return source.read() if of_terminal else None
    if isinstance(source, io.TextIOWrapper):
        source.reconfigure(encoding="utf-8-sig", errors="strict")  # without a byte order mark
    try:
        return source.read()
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise UserError(f"standard input is not UTF-8 text: it has the byte {wrong:#04x}; convert it first") from None
