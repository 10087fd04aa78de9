"""Builds RoBERTa's byte-level BPE from vocab.json and merges.txt, for older checkpoints without tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from slipstream.config.tokenizer_class import tokenizer_class
from slipstream.errors import BadTokenizer
from slipstream.text.vocab_files import add_tokens, read_object, require_token

_KIND = "RobertaTokenizer"
_SPECIAL = {
    "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>",
    "pad_token": "<pad>", "mask_token": "<mask>",
}  # fmt: skip


def roberta_tokenizer(
    folder: Path, settings: Mapping[str, Any], given: Mapping[str, str]
) -> tuple[Backend, dict[str, str]]:
    """Returns the tokenizer and its special tokens by role. `settings`: tokenizer_config.json; `given`: the special
    tokens in the folder's files."""
    kind = tokenizer_class(dict(settings), read_object(folder / "config.json"))
    if kind != _KIND:
        raise BadTokenizer(
            f"{folder} has no tokenizer.json, and its vocab.json is for {kind}; only RobertaTokenizer is built from "
            "that file: save the tokenizer once with transformers, so that the folder has tokenizer.json"
        )
    special = {**_SPECIAL, **given}
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises plain Exceptions
        raise BadTokenizer(
            f"vocab.json and merges.txt of {folder} cannot be read: {error}; download both again"
        ) from None
    backend = Backend(model)
    with_space = bool(settings.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=with_space)
    backend.decoder = decoders.ByteLevel()
    add_tokens(folder, backend, special)
    sep, cls = (require_token(folder, backend, special, role, kind) for role in ("sep_token", "cls_token"))
    trims = bool(settings.get("trim_offsets", True))
    backend.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=trims, add_prefix_space=with_space)
    return backend, special
