"""AdapterConfig: how many LoRA adapters an engine holds, and how large one is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from slipstream.base.errors import InvalidAdapter, InvalidOption
from slipstream.checkpoint.locate import MAX_RANK, check_adapter_folder
from slipstream.config.options import Options
from slipstream.params.lora import LoRARequest

MAX_ADAPTERS = 1024  # on the device or in host memory
_DEFAULT_RANK = 16


class AdapterConfig(msgspec.Struct, frozen=True):
    max_loras: int  # on the device: distinct adapters in one step
    max_cpu_loras: int  # in host memory
    max_lora_rank: int
    num_elements: int  # of one adapter, in the model's dtype
    widest: int  # maximum number of outputs of all matrices A of one product


def read_adapter_config(options: Options, measure: Callable[[int], tuple[int, int]]) -> AdapterConfig | None:
    """None if adapters are off. `measure`: from a rank to the number of elements of an adapter and to `widest`."""
    given = {
        "max_loras": options.max_loras,
        "max_cpu_loras": options.max_cpu_loras,
        "max_lora_rank": options.max_lora_rank,
        "lora_modules": options.lora_modules,
    }
    if not options.enable_lora:
        for name, value in given.items():
            if value is not None:
                raise InvalidOption(f"{name} is given and enable_lora is not; set enable_lora or remove {name}")
        return None
    if options.deterministic:
        raise InvalidOption("deterministic and enable_lora are both set; sums of adapters depend on the batch, set one")
    max_loras = _within("max_loras", options.max_loras, 1, MAX_ADAPTERS)
    max_cpu_loras = _within("max_cpu_loras", options.max_cpu_loras, max_loras, MAX_ADAPTERS)
    if max_cpu_loras < max_loras:
        raise InvalidOption(
            f"max_cpu_loras is {max_cpu_loras}, fewer than max_loras, {max_loras}; adapters on the device are in host "
            "memory too: raise the first or lower the second"
        )
    rank = _within("max_lora_rank", options.max_lora_rank, _DEFAULT_RANK, MAX_RANK)
    return AdapterConfig(max_loras, max_cpu_loras, rank, *measure(rank))


def _within(name: str, value: int | None, default: int, limit: int) -> int:
    value = default if value is None else value
    if not 1 <= value <= limit:
        raise InvalidOption(f"{name} is {value}; give 1 to {limit}")
    return value


def check_lora_modules(options: Options) -> None:
    """Checks that the adapters of `lora_modules` exist and that their settings can run; matrices are read later."""
    if not options.enable_lora:  # refused later, with every other option of adapters
        return
    for each in read_lora_modules(options.lora_modules):
        try:
            check_adapter_folder(Path(each.lora_path), options.max_lora_rank or _DEFAULT_RANK)
        except InvalidAdapter as error:
            raise InvalidAdapter(f"the adapter {each.lora_name} of lora_modules: {error}") from None


def read_lora_modules(given: list[str] | None) -> tuple[LoRARequest, ...]:
    """The adapters of `lora_modules`, numbered from 1."""
    found: dict[str, LoRARequest] = {}
    for number, text in enumerate(given or (), 1):
        name, separator, path = text.partition("=")
        if not separator or name in found:
            fact = "has no =" if not separator else f"names {name} twice"
            raise InvalidOption(f"lora_modules {fact} ({text}); give name=folder, each name once")
        try:
            found[name] = LoRARequest(name, number, path)
        except InvalidAdapter as error:
            raise InvalidOption(f"lora_modules: {error}") from None
    return tuple(found.values())
