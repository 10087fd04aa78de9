"""The projection to tokens as the folder's weights have it, if config.json disagrees with them.

As transformers does: tied weights that are both in the file and differ are not tied. A quantised projection differs. An
untied checkpoint without the projection (how several embedders are published) does not generate.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from slipstream.checkpoint.architecture import continues_text
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.encoder import EncoderShape
from slipstream.nn.models.registry import find_rules, find_shape
from slipstream.nn.weights.rules import Rules
from slipstream.nn.weights.safetensors import open_folder
from slipstream.nn.weights.source import SourceTensor, WeightSource, in_parts

EMBEDDING, HEAD = "embedding.weight", "head.weight"  # our parameters
# what encoders call the projection back to words, which is their embedding mostly
_WORDS = ("cls.predictions.decoder.weight", "lm_head.decoder.weight", "vocab_projector.weight", "decoder.weight")


def as_stored(info: ModelInfo, folder: Path) -> ModelInfo:
    """The `ModelInfo` with `tied_embeddings` and `has_lm_head` corrected by what its weights are."""
    if info.backend_folder or not (continues_text(info.architecture) or info.architecture.endswith("ForMaskedLM")):
        return info  # only the backbone runs
    shape = find_shape(info)
    if isinstance(shape, EncoderShape):
        return _with_words(info, shape, folder)
    if shape.headless:
        return info
    rules = find_rules(info, replace(shape, tied=False))
    source = open_folder(folder)
    found = find_named(source, rules, (EMBEDDING, HEAD))
    embedding, head = found.get(EMBEDDING), found.get(HEAD)
    if _is_quantized(source, rules):
        return msgspec.structs.replace(info, tied_embeddings=False)
    if head is None:
        return info if shape.tied else msgspec.structs.replace(info, has_lm_head=False)
    if not shape.tied or embedding is None or _are_equal(embedding, head):
        return info
    return msgspec.structs.replace(info, tied_embeddings=False)


def _is_quantized(source: WeightSource, rules: Rules) -> bool:
    """Whether the projection to tokens has tensors of a quantisation: scales, packed numbers."""
    for tensor in source:
        module, _, kind = tensor.name.rpartition(".")
        if kind not in ("weight", "bias") and _renamed(rules, f"{module}.weight") == HEAD:
            return True
    return False


def _renamed(rules: Rules, name: str) -> str | None:
    try:
        return rules.rename(name)
    except KeyError:  # loading says so
        return None


def _with_words(info: ModelInfo, shape: EncoderShape, folder: Path) -> ModelInfo:
    source = open_folder(folder)
    words = next((tensor for tensor in source if tensor.name in _WORDS), None)
    embedding = find_named(source, find_rules(info, shape), (EMBEDDING,)).get(EMBEDDING)
    if words is None or embedding is None or _are_equal(embedding, words):
        return info
    return msgspec.structs.replace(info, tied_embeddings=False)


def find_named(source: WeightSource, rules: Rules, parameters: tuple[str, ...]) -> dict[str, SourceTensor]:
    """The tensors of these parameters, as far as the source has them."""
    found: dict[str, SourceTensor] = {}
    for tensor in source:
        name = _renamed(rules, tensor.name)
        if name in parameters:
            found[name] = tensor
    return found


def _are_equal(one: SourceTensor, other: SourceTensor) -> bool:
    """Whether the values are equal. Compared part by part: a vocabulary's vectors may be gigabytes."""
    if one.shape != other.shape:
        return False
    parts = zip(in_parts(one.read()), in_parts(other.read()), strict=True)
    return all(bool((a == b).all()) for a, b in parts)
