"""Streams a checkpoint into a model: every place exactly once, one tensor in memory at a time.

Names and shapes are compared before the first tensor is read, so a wrong checkpoint fails at once, with a list.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.errors import BadCheckpoint
from slipstream.nn.weight_format import WeightSlot
from slipstream.nn.weights.rules import Rules
from slipstream.nn.weights.source import SourceTensor, WeightSource
from slipstream.nn.weights.unused import count_layers, is_buffer, is_past_layers, is_unused

HEADS = "heads."  # how the places of what stands behind the hidden states begin
SHOWN = 4  # names of each mistake that a message lists


def find_places(model: nn.Module) -> dict[str, WeightSlot]:
    """Every place of a model by its name."""
    places: dict[str, WeightSlot] = {}
    for prefix, module in model.named_modules():
        if hasattr(module, "places"):
            places |= {f"{prefix}.{name}": place for name, place in module.places()}
    return places


def match_places(
    source: WeightSource,
    rules: Rules | None,
    places: Mapping[str, WeightSlot],
    others: Sequence[tuple[WeightSource, Rules]] = (),
) -> tuple[dict[str, SourceTensor], list[str]]:
    """Which tensor of the source goes to which place, and the names of tensors that are left out because nothing that
    the model computes reads them (`unused.py`). Without rules, names are the same. Raises BadCheckpoint.

    `others` are further sources, each with its rules. Heads that the model has no use for are left where they are.
    """
    found: dict[str, SourceTensor] = {}
    num_layers = count_layers(places)
    unexpected: list[str] = []
    unused: list[str] = []
    misshapen, twice = [], []
    for tensor, names in _all_of([(source, rules), *others]):
        try:
            name = names.rename(tensor.name) if names is not None else tensor.name
        except KeyError:
            (unused if is_unused(tensor.name, num_layers) else unexpected).append(tensor.name)
            continue
        if name is None or (name.startswith(HEADS) and name not in places):
            continue
        if name not in places:
            past = is_buffer(tensor.name) or is_past_layers(tensor.name, num_layers)
            (unused if past else unexpected).append(tensor.name)
        elif name in found:
            twice.append(tensor.name)
        elif tensor.shape != places[name].shape:
            misshapen.append(f"{tensor.name} is {list(tensor.shape)}, should be {list(places[name].shape)}")
            found[name] = tensor
        else:
            found[name] = tensor
    missing = [name for name in places if name not in found]
    if missing:  # then one of these may be what is missing, under a name that no rule knows
        unexpected, unused = [*unused, *unexpected], []
    mistakes = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen, "there twice": twice}
    if any(mistakes.values()):
        parts = [f"{len(names)} {kind} ({few(names)})" for kind, names in mistakes.items() if names]
        raise BadCheckpoint(
            f"the weights do not fit the model that its config describes: {'; '.join(parts)}; "
            "check that weights and config come from the same model"
        )
    return found, unused


def _all_of(parts: Sequence[tuple[WeightSource, Rules | None]]) -> Iterator[tuple[SourceTensor, Rules | None]]:
    for source, rules in parts:
        for tensor in source:
            yield tensor, rules


def fill_places(tensors: Mapping[str, SourceTensor], places: Mapping[str, WeightSlot], progress: bool = False) -> None:
    """Read each tensor into its place. `tensors` are as `match_places` found them."""
    total = sum(tensor.num_elements for tensor in tensors.values())
    with torch.no_grad(), _progress_bar(total, progress) as bar:
        for name, tensor in tensors.items():
            places[name].fill(tensor)
            bar.advance(tensor.num_elements)


class _Bar(Protocol):
    def advance(self, count: int) -> None: ...


class _NoBar:
    def advance(self, count: int) -> None:
        pass


class _RichBar:
    def __init__(self, progress: Any, task: Any) -> None:
        self.progress = progress
        self.task = task

    def advance(self, count: int) -> None:
        self.progress.advance(self.task, count)


@contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[_Bar]:
    if not wanted or not sys.stderr.isatty():
        yield _NoBar()
        return
    from rich.console import Console  # only an interactive terminal pays for the import
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield _RichBar(progress, progress.add_task("loading weights", total=total))


def few(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
