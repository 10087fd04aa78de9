"""Reads adapter_config.json of a PEFT folder, and refuses what is not plain LoRA."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from slipstream.config.json_file import load_json
from slipstream.config.module_patterns import ModulePatterns
from slipstream.config.weight_files import ADAPTER
from slipstream.errors import InvalidAdapter

MAX_RANK = 256
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

# settings that change the arithmetic: values that change nothing, and what the setting is; fan_in_fan_out (GPT-2) is
# not among them: A and B have the same layout with it, only PEFT's merge transposes their product
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((None, False), "DoRA (use_dora) is not supported"),
    "modules_to_save": ((None, []), "fully trained modules (modules_to_save) are not supported"),
    "bias": ((None, "none"), "trained biases (bias) are not supported"),
    "lora_bias": ((None, False), "a bias of B (lora_bias) is not supported"),
    "target_parameters": ((None, []), "adapters of expert weights (target_parameters) are not supported"),
    "trainable_token_indices": ((None, []), "trained token vectors (trainable_token_indices) are not supported"),
    "layer_replication": ((None, []), "replicated layers (layer_replication) are not supported"),
    "alora_invocation_tokens": ((None, []), "activated LoRA (alora_invocation_tokens) is not supported"),
    "use_qalora": ((None, False), "QALoRA (use_qalora) is not supported"),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the weights of the base model."""


class AdapterSettings(msgspec.Struct, frozen=True):
    """Settings of an adapter that its tensors do not contain."""

    alpha: float
    patterns: ModulePatterns  # alpha_pattern: of modules with another alpha
    pattern_alphas: list[float]  # of each pattern
    rank_stabilized: bool  # rsLoRA: divide by the square root of the rank
    rank: int = 0  # of all modules; 0: they differ, or it is not said

    def scale(self, module: str, rank: int) -> float:
        """The factor of B A for a module with this name in the base model. Raises InvalidAdapter."""
        try:
            found = self.patterns.first_match(module)
        except ValueError as error:
            raise InvalidAdapter(f"alpha_pattern of {ADAPTER}: {error}") from None
        alpha = self.alpha if found is None else self.pattern_alphas[found]
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def check_adapter_folder(folder: Path, max_rank: int) -> None:
    """Checks the settings and the rank, before the matrices are read. Raises InvalidAdapter."""
    rank = read_adapter_settings(folder).rank
    if rank > max_rank:
        raise InvalidAdapter(f"{folder} has rank {rank}, and the engine takes up to {max_rank}; raise --max-lora-rank")


def read_adapter_settings(folder: Path) -> AdapterSettings:
    """Raises InvalidAdapter."""
    path = folder / ADAPTER
    if not path.is_file():
        raise InvalidAdapter(f"{folder} has no {ADAPTER}; give the folder of a PEFT LoRA adapter")
    try:
        found: Any = load_json(path)
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{path} cannot be read ({error}); download it again") from None
    if not isinstance(found, dict):
        raise InvalidAdapter(f"{path} is not an object; download it again")
    kind = found.get("peft_type")
    if kind != "LORA":
        raise InvalidAdapter(f"{folder} is a PEFT adapter of type {kind!r}; only LORA is supported, merge it instead")
    for name, (fine, message) in _REFUSED.items():
        if (value := found.get(name)) not in fine:
            raise InvalidAdapter(f"{folder}: {message}, and {name} is {value!r}; merge the adapter into its base model")
    start = found.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise InvalidAdapter(
            f"{folder}: init_lora_weights is {start!r}, which changes the base model's weights too; convert the "
            "adapter to plain LoRA (PEFT: path_initial_model_for_weight_conversion), or merge it"
        )
    alphas = found.get("alpha_pattern") or {}
    try:
        settings = AdapterSettings(
            alpha=_number(found.get("lora_alpha", 8)),  # PEFT's default
            patterns=ModulePatterns(alphas),
            pattern_alphas=[_number(alpha) for alpha in alphas.values()],
            rank_stabilized=bool(found.get("use_rslora", False)),
            rank=rank if isinstance(rank := found.get("r"), int) and not found.get("rank_pattern") else 0,
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidAdapter(f"{path}: lora_alpha or alpha_pattern is not valid ({error}); correct it") from None
    return settings


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
