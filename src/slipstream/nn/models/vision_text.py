"""Tensor names of models that see pictures, of which the text part runs."""

from __future__ import annotations

from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_rules
from slipstream.nn.weights.rules import Rules

_PARTS = ("visual", "vision_tower", "vision_model", "multi_modal_projector")
_ROOTS = ("model.language_model", "language_model.model", "model", "")


def vision_text_rules(shape: DecoderShape) -> Rules:
    """Rules of the text part, in the names of older and newer releases; tensors for images are left out."""
    pictures = {f"{root}{part}.*": None for root in ("", "model.") for part in _PARTS}
    head = {"language_model.lm_head.{kind}": None if shape.tied or shape.headless else "head.{kind}"}
    return Rules(pictures | head) | llama_rules(shape, roots=_ROOTS)
