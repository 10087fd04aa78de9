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


def infill_ids(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int] | None:
    """Returns the token ids of the prompt; None for a model without such tokens."""
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
    if (marks := _ids(tokenizer, _SUFFIX_FIRST)) is not None:
        ids = [marks[0], *parts[1], marks[1], *parts[0]]
    elif (marks := _marks(tokenizer)) is not None:
        ids = [marks[0], *parts[0], marks[1], *parts[1], marks[2]]
    else:
        return None
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
