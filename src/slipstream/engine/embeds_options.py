"""Checks that a model can take the embeddings of a prompt instead of its token ids."""

from __future__ import annotations

from slipstream.base.errors import InvalidOption
from slipstream.config.options import Options
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.encoder import EncoderShape


def check_prompt_embeds(options: Options, shape: DecoderShape | EncoderShape) -> None:
    """Raises InvalidOption if enable_prompt_embeds is set and the model or another option needs token ids."""
    if not options.enable_prompt_embeds:
        return
    if isinstance(shape, EncoderShape):
        raise InvalidOption("enable_prompt_embeds is for decoders, and the model is an encoder; remove it")
    if shape.layer_inputs is not None:
        raise InvalidOption(
            "enable_prompt_embeds: the layers of this model look up inputs of their own by token id; remove it"
        )
    if options.speculative_config is not None or options.drafts is not None:
        raise InvalidOption(
            "enable_prompt_embeds: drafts are made of the prompt's token ids; remove speculative_config"
        )
    if options.tensor_parallel_size > 1:
        raise InvalidOption("enable_prompt_embeds is for one rank; set tensor_parallel_size to 1")
