"""Streams a checkpoint into a model: fills every weight target exactly once, with one tensor in memory at a time.

Names and shapes are compared before the first tensor is read, so a wrong checkpoint fails at once, with a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from slipstream.base.errors import BadCheckpoint
from slipstream.base.log import progress
from slipstream.nn.weights.source import (
    Rules,
    SourceTensor,
    WeightSource,
    count_layers,
    is_buffer,
    is_past_layers,
    is_unused,
)
from slipstream.nn.weights.stored_part import sharded_targets
from slipstream.nn.weights.weight_format import WeightTarget

HEADS, TOWER = "heads.", "tower."  # prefixes of the targets of pooling heads, and of the tower of a model that sees
SHOWN = 4  # names per kind of mistake in an error message


def find_targets(model: nn.Module) -> dict[str, WeightTarget]:
    """All weight targets of a model by name."""
    targets: dict[str, WeightTarget] = {}
    for prefix, module in model.named_modules():
        if hasattr(module, "weight_targets"):
            own = sharded_targets(dict(module.weight_targets()), getattr(module, "stored_parts", None))
            targets |= {f"{prefix}.{name}": target for name, target in own.items()}
    return targets


def match_targets(
    source: WeightSource,
    rules: Rules | None,
    targets: Mapping[str, WeightTarget],
    others: Sequence[tuple[WeightSource, Rules]] = (),
) -> tuple[dict[str, SourceTensor], list[str]]:
    """The source tensor of each target, and the names of tensors that are skipped because the model does not read them
    (`is_unused`). Without rules, tensor names are target names. Raises BadCheckpoint.

    `others`: further sources, each with its rules. Tensors of heads that the model does not have are ignored.
    """
    found: dict[str, SourceTensor] = {}
    of_tower = {name for name in targets if name.startswith(TOWER)}
    num_layers, tower_layers = count_layers(targets.keys() - of_tower), count_layers(of_tower)
    unexpected: list[str] = []
    unused: list[str] = []
    wrong_shape, duplicate = [], []
    for tensor, names in _all_of([(source, rules), *others]):
        try:
            name = names.rename(tensor.name) if names is not None else tensor.name
        except KeyError:
            (unused if is_unused(tensor.name, num_layers) else unexpected).append(tensor.name)
            continue
        if name is None or (name.startswith(HEADS) and name not in targets):
            continue
        if name not in targets:
            count = tower_layers if name.startswith(TOWER) else num_layers
            past = is_buffer(tensor.name) or is_past_layers(tensor.name, count)
            (unused if past else unexpected).append(tensor.name)
        elif name in found:
            duplicate.append(tensor.name)
        elif tensor.shape != targets[name].shape:
            wrong_shape.append(f"{tensor.name} is {list(tensor.shape)}, expected {list(targets[name].shape)}")
            found[name] = tensor
        else:
            found[name] = tensor
    missing = [name for name in targets if name not in found]
    if missing:  # a skipped tensor may be the missing one under an unknown name
        unexpected, unused = [*unused, *unexpected], []
    mistakes = {"missing": missing, "unexpected": unexpected, "of wrong shape": wrong_shape, "duplicate": duplicate}
    if any(mistakes.values()):
        parts = [f"{len(names)} {kind} ({few(names)})" for kind, names in mistakes.items() if names]
        raise BadCheckpoint(
            f"the weights do not match the model that config.json describes: {'; '.join(parts)}; "
            "check that weights and config come from the same model"
        )
    return found, unused


def _all_of(parts: Sequence[tuple[WeightSource, Rules | None]]) -> Iterator[tuple[SourceTensor, Rules | None]]:
    for source, rules in parts:
        for tensor in source:
            yield tensor, rules


def fill_targets(tensors: Mapping[str, SourceTensor], targets: Mapping[str, WeightTarget], shown: bool = False) -> None:
    """Reads each tensor into its target. `tensors`: the result of `match_targets`."""
    with torch.no_grad(), progress(len(tensors), "tensors of the weights", shown) as advance:
        for name, tensor in tensors.items():
            targets[name].fill(tensor)
            advance(0)


def few(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
