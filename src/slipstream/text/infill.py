"""Prompts of models that fill in the middle: a text before and a text after the output, between tokens of the model."""

from __future__ import annotations

from slipstream.text.tokenizer import Tokenizer

# tokens before the prefix, before the suffix, and before the output
_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral: the suffix, then the prefix, which the output continues
# tokens that such models write after the output
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<fim_pad>",
    "▁<EOT>", "<|EOT|>",
)  # fmt: skip


def can_infill(tokenizer: Tokenizer) -> bool:
    """Whether the model has tokens for it."""
    return _ids(tokenizer, _SUFFIX_FIRST) is not None or _marks(tokenizer) is not None


def infill_ids(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Returns the token ids of the prompt, for a model that can fill in the middle."""
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
    if (marks := _ids(tokenizer, _SUFFIX_FIRST)) is not None:
        ids = [marks[0], *parts[1], marks[1], *parts[0]]
    else:
        marks = _marks(tokenizer)
        assert marks is not None, "can_infill says whether there are such tokens"
        ids = [marks[0], *parts[0], marks[1], *parts[1], marks[2]]
    bos = tokenizer.bos_token_id
    return [bos, *ids] if bos is not None and tokenizer.encode("a")[:1] == [bos] else ids


def infill_stops(tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids that end an output in the middle."""
    known = (tokenizer.backend.token_to_id(text) for text in _ENDS)
    return [*(_marks(tokenizer) or ()), *(token for token in known if token is not None)]


def _marks(tokenizer: Tokenizer) -> list[int] | None:
    return next((ids for texts in _TOKENS if (ids := _ids(tokenizer, texts)) is not None), None)


def _ids(tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[int] | None:
    ids = [token for text in texts if (token := tokenizer.backend.token_to_id(text)) is not None]
    return ids if len(ids) == len(texts) else None
