"""Finds the classes of an engine's logits processors and makes one object of each."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

from slipstream.base.errors import InvalidOption
from slipstream.config.config import EngineConfig
from slipstream.params.processors import AdapterLogitsProcessor, LogitsProcessor

if TYPE_CHECKING:
    import torch

ENTRY_POINTS = "slipstream.logits_processors"
"""Group of the entry points of installed packages. Their classes are part of every engine."""


def find_classes(given: Sequence[object]) -> tuple[type[LogitsProcessor], ...]:
    """Classes of the option logits_processors, which has classes and names like package.module:Class, after those of
    installed packages."""
    found: list[object] = []
    for entry in installed():
        try:
            found.append(entry.load())
        except Exception as error:
            raise InvalidOption(
                f"the entry point {entry.name} of {ENTRY_POINTS} cannot be loaded: {_reason(error)}; repair or remove "
                "its package"
            ) from error
    found += [_load(each) if isinstance(each, str) else each for each in given]
    return tuple(dict.fromkeys(each for each in found if _check(each)))


@functools.cache
def installed() -> tuple[importlib.metadata.EntryPoint, ...]:
    """Entry points of installed packages. Reading all packages takes longer than the rest of a small engine's start."""
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINTS))


def make_processors(
    classes: Sequence[type[LogitsProcessor]], config: EngineConfig, device: torch.device, *, is_pin_memory: bool
) -> list[LogitsProcessor]:
    made = []
    for each in classes:
        try:
            made.append(each(config, device, is_pin_memory))
        except Exception as error:
            raise InvalidOption(
                f"the logits processor {each.__name__} cannot be made: {_reason(error)}; repair it or remove it from "
                "logits_processors"
            ) from error
    return made


def _load(name: str) -> object:
    module, _, qualified = name.partition(":")
    if not module or not qualified:
        raise InvalidOption(f"logits_processors has {name!r}; give a class, or its name as package.module:Class")
    try:
        found: object = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except Exception as error:  # the module is code of the user
        raise InvalidOption(f"logits_processors has {name!r}, which cannot be imported: {_reason(error)}") from error
    return found


def _check(found: object) -> TypeGuard[type[LogitsProcessor]]:
    """Raises if it is no class of a logits processor with all methods."""
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise InvalidOption(
            f"logits_processors has {found!r}; give classes that inherit slipstream.LogitsProcessor or "
            "slipstream.AdapterLogitsProcessor, or their names as package.module:Class"
        )
    base = AdapterLogitsProcessor if issubclass(found, AdapterLogitsProcessor) else LogitsProcessor
    needed = ["is_argmax_invariant", "update_state", "apply"]
    if issubclass(found, AdapterLogitsProcessor):
        if found.needs not in ("tokens", "logits"):
            raise InvalidOption(f'{found.__name__}.needs is {found.needs!r}; give "tokens" or "logits"')
        needed = ["new_req_logits_processor", *(["is_argmax_invariant"] if found.needs == "logits" else [])]
    for name in needed:
        if getattr(found, name) is getattr(base, name):
            raise InvalidOption(f"the logits processor {found.__name__} has no method {name}; define it")
    return True


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
