"""TransformersDecoder: a decoder of the transformers library with our paged attention, cache, batching and sampling.

It serves architectures without a family of our own. All tokens of a step are one row of the library's module; positions
are given, and attention finds the rows in the step's context. The module launches its own kernels. Steps are captured
in CUDA graphs unless the module waits for the device (`transformers_probe.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.base.errors import NotEnoughMemory, UnsupportedModel
from slipstream.checkpoint.architecture import continues_text
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.config.config import ModelConfig
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.shapes import AttentionShape, LayerShape, MlpShape, NormShape
from slipstream.nn.transformers_probe import (
    NAME,
    AttentionCall,
    base_of,
    find_class,
    first_int,
    handle_attention,
    hidden_of,
    is_classifier,
    load_config,
    max_positions,
    new_module,
    position_offset,
    probe,
    register,
)
from slipstream.ops.attention import write_cache
from slipstream.ops.gemm.lora import LoraTiles


def transformers_shape(info: ModelInfo) -> DecoderShape:
    """The shape as far as the cache and the memory estimate read it: a layer for each call of attention."""
    mlp = MlpShape(size=info.ffn_size, activation="silu")
    norm = NormShape(eps=info.norm_eps)
    return DecoderShape(
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        layers=tuple(
            LayerShape(mixers=(_attention(call),), feed=mlp, norm=norm) for call in probe(info.backend_folder).calls
        ),
        ropes=(),
        norm=norm,
        max_positions=info.max_positions,
        tied=info.tied_embeddings,
        headless=not info.is_causal or not continues_text(info.architecture),
    )


def _attention(call: AttentionCall) -> AttentionShape:
    return AttentionShape(
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
        sinks=call.sinks,
        causal=call.causal,
    )


class TransformersDecoder(nn.Module):
    def __init__(self, info: ModelInfo, module: Any) -> None:
        """`module`: the library's causal LM, or its classifier over a decoder."""
        super().__init__()
        self.shape = transformers_shape(info)
        self.heads: LibraryHeads | None = None
        self.layers = nn.ModuleList()  # none that a start could run alone
        self.base = base_of(module)
        self.scales = [call.scale for call in probe(info.backend_folder).calls]
        # without its layers it computes logits or classes of given hidden states
        self.causal = module
        self.given = GivenStates()
        replace_layers(module, self.base, self.given)
        if is_classifier(info.architecture):
            self.heads = LibraryHeads(module, self.given)
        handle_attention(self.base, self._attend)
        self._context: ForwardContext | None = None
        self._site = 0

    def forward(self, context: ForwardContext) -> torch.Tensor:
        batch = context.batch
        self._context, self._site = context, 0
        try:
            hidden = self._hidden(batch)
        finally:
            self._context = None
        assert self._site == len(self.scales), f"{self._site} calls of attention, {len(self.scales)} in the probe"
        return hidden.index_select(0, context.last_indices()) if context.only_last else hidden

    def _hidden(self, batch: BatchView) -> torch.Tensor:
        positions = batch.positions.unsqueeze(0)
        if batch.embeds is None:
            return hidden_of(self.base, positions, input_ids=batch.ids.unsqueeze(0))[0]
        x = self.base.get_input_embeddings()(batch.ids)
        batch.embeds.write_to(x)
        return hidden_of(self.base, positions, inputs_embeds=x.unsqueeze(0))[0]

    def _attend(
        self,
        layer: Any,
        query: torch.Tensor,  # [1, heads, T, head dim]
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[1, T, heads, value dim]"""
        context, site = self._context, self._site
        assert context is not None, "attention outside of a step"
        self._site += 1
        query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        value_dim = value.shape[2]
        if value_dim < key.shape[2]:
            value = F.pad(value, (0, key.shape[2] - value_dim))
        keys, values = context.caches[site]
        write_cache(key, value, keys, values, context.batch.slots[context.group_of_site[site]])
        out = context.attention.forward(query, key, value, site, self.scales[site], context, s_aux)
        return out[..., :value_dim].unsqueeze(0)

    def logits(self, hidden: torch.Tensor, tiles: LoraTiles | None = None) -> torch.Tensor:
        """Computes logits by the library's own causal LM, with its scales and caps."""
        assert tiles is None, "modules of the transformers library have no adapters here"
        self.given.hidden = hidden.unsqueeze(0)
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self.causal(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        self.given.hidden = None
        return logits.to(hidden.dtype)

    def lm_rows(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.causal.get_output_embeddings().weight.index_select(0, ids)
        return rows

    def use_layers(self, layers: nn.ModuleList) -> None:
        """The module runs as a whole."""


def lay_out_transformers(config: ModelConfig) -> TransformersDecoder | TransformersEncoder:
    """Builds the module on the meta device, for its sizes."""
    module = new_module(load_config(config.info.backend_folder), getattr(torch, config.dtype))
    return _wrapped(config.info, module)


def _wrapped(info: ModelInfo, module: Any) -> TransformersDecoder | TransformersEncoder:
    if info.is_causal:
        return TransformersDecoder(info, module)
    return TransformersEncoder(info, transformers_shape(info), module)


def load_transformers(config: ModelConfig, device: torch.device) -> TransformersDecoder | TransformersEncoder:
    """Loads the module with its weights."""
    if config.load_format != "safetensors":
        raise UnsupportedModel(
            f"{config.info.architecture} runs by transformers' module, which loads a folder with weights; "
            f"load_format {config.load_format} is for families of our own"
        )
    if config.pooling is not None and (config.pooling.modules or config.pooling.yes_no is not None):
        raise UnsupportedModel(
            f"{config.info.architecture} runs by transformers' module; layers behind its pooling are for families of "
            "our own"
        )
    register()
    own = load_config(config.info.backend_folder)
    kind = find_class(own)
    try:
        module = kind.from_pretrained(
            config.info.backend_folder,
            config=own,
            dtype=getattr(torch, config.dtype),
            attn_implementation=NAME,
            local_files_only=True,
        )
        module = module.to(device).eval()
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise NotEnoughMemory(
            f"{config.name} does not fit the memory of {device} in {config.dtype}; take a smaller dtype or model"
        ) from error
    return _wrapped(config.info, module.requires_grad_(False))


def transformers_info(folder: str) -> ModelInfo:
    """The ModelInfo of a model that runs by the library's module. Raises UnsupportedModel."""
    config = load_config(folder)
    find_class(config)
    text = config.get_text_config()
    try:
        hidden, heads, vocab_size = int(text.hidden_size), int(text.num_attention_heads), int(text.vocab_size)
    except (AttributeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"the transformers library's config is of no language model: {error}") from None
    found = probe(folder)
    calls = found.calls
    ends = text.eos_token_id if text.eos_token_id is not None else config.eos_token_id
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    return ModelInfo(
        architecture=config.architectures[0],
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=len(calls),
        num_heads=heads,
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        ffn_size=first_int(text, ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dff"), 4 * hidden),
        max_positions=max_positions(config),
        norm_eps=1e-6,
        activation="silu",
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        eos_token_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (int(ends),),
        bos_token_id=text.bos_token_id if isinstance(text.bos_token_id, int) else None,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        backend_folder=folder,
        backend_waits=found.waits,
        is_causal=calls[0].causal,
        num_types=first_int(text, ("type_vocab_size",), 0),
        extra=config.to_dict(),
    )


# TransformersEncoder: an encoder of the transformers library with our batching, attention and pooling.
#
# It serves architectures without a family of our own. A step has whole texts as one row of the library's module,
# without padding; positions are given, and attention finds the texts in the step's context.


class TransformersEncoder(nn.Module):
    def __init__(self, info: ModelInfo, shape: DecoderShape, module: Any) -> None:
        super().__init__()
        self.shape = shape
        self.heads: LibraryHeads | None = None
        self.layers = nn.ModuleList()  # none that a start could run alone
        self.base = base_of(module)
        self.scales = [call.scale for call in probe(info.backend_folder).calls]
        self.position_offset = position_offset(self.base)
        self.has_types = info.num_types > 0
        handle_attention(self.base, self._attend)
        if is_classifier(info.architecture):
            given = GivenStates(getattr(self.base, "pooler", None))
            replace_layers(module, self.base, given)
            self.heads = LibraryHeads(module, given)
        self._context: ForwardContext | None = None
        self._site = 0

    def forward(self, context: ForwardContext) -> torch.Tensor:
        batch = context.batch
        self._context, self._site = context, 0
        inputs = {"input_ids": batch.ids.unsqueeze(0)}
        if self.has_types:
            types = torch.zeros_like(batch.ids) if batch.token_types is None else batch.token_types
            inputs["token_type_ids"] = types.unsqueeze(0)
        try:
            return hidden_of(self.base, (batch.positions + self.position_offset).unsqueeze(0), **inputs)[0]
        finally:
            self._context = None

    def _attend(
        self,
        layer: Any,
        query: torch.Tensor,  # [1, heads, T, head dim]
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[1, T, heads, head dim]"""
        context, site = self._context, self._site
        assert context is not None, "attention outside of a step"
        self._site += 1
        query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        return context.attention.bidirectional(query, key, value, self.scales[site], context).unsqueeze(0)

    def use_layers(self, layers: nn.ModuleList) -> None:
        """The module runs as a whole."""


# Heads of modules of the transformers library: its own code computes logits and classes from given hidden states.
#
# The layers of a causal LM or a classifier are replaced by `GivenStates`, which returns hidden states that were
# computed before. So scales, caps, poolers and classifiers are the library's, whatever they are.


class GivenStates(nn.Module):
    """In place of the layers of a module. `pooler`: that of the layers, for encoders that have one."""

    def __init__(self, pooler: nn.Module | None = None) -> None:
        super().__init__()
        self.pooler = pooler
        self.hidden: torch.Tensor | None = None
        self.__dict__["decoder"] = self  # some causal LMs call this part of their layers

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        assert self.hidden is not None
        return _Outputs(self.hidden, None if self.pooler is None else self.pooler(self.hidden))


class _Outputs:
    """The result of the layers as a head reads it: hidden states, the pooler's output, None for everything else."""

    def __init__(self, hidden: torch.Tensor, pooled: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden
        self.pooler_output = pooled

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return (self.last_hidden_state, self.pooler_output)[index]

    def __getattr__(self, name: str) -> None:
        return None


def replace_layers(module: Any, base: Any, given: GivenStates) -> None:
    """`module` calls `given` from now on, and `base` is no part of it."""
    setattr(module, next(name for name, child in module.named_children() if child is base), given)


class LibraryHeads(nn.Module):
    """The classes of a module for classification of texts or tokens. Has the methods of `Heads` that its tasks use."""

    sparse_by = None

    def __init__(self, module: Any, given: GivenStates) -> None:
        super().__init__()
        self.classifier, self.given = module, given
        self.dtype = next(module.parameters()).dtype
        config = module.config.get_text_config()
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # a decoder's classifier looks for the last token before padding: texts have one

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden] to scores [N, classes]: N texts of one token each for the library."""
        self.given.hidden = pooled.to(self.dtype).unsqueeze(1)
        ids = torch.zeros(len(pooled), 1, dtype=torch.int64, device=pooled.device)
        scores: torch.Tensor = self.classifier(input_ids=ids, return_dict=True).logits
        self.given.hidden = None
        return scores.reshape(len(pooled), -1).float() if self.dtype != torch.float64 else scores.flatten(1)

    def token_classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to scores [T, classes]."""
        return self.classify(hidden)

    def embed(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled

    def token_embed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden
