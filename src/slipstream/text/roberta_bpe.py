"""RoBERTa's byte-level BPE from a folder that has only vocab.json and merges.txt, as its older checkpoints do."""

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
    """The tokenizer and its special tokens by role. `settings` are tokenizer_config.json's, `given` the special tokens
    that the folder's files name."""
    kind = tokenizer_class(dict(settings), read_object(folder / "config.json"))
    if kind != _KIND:
        raise BadTokenizer(
            f"{folder} has no tokenizer.json, and its vocab.json is a {kind}'s, which is not built here; RoBERTa's is: "
            "save the tokenizer once with transformers, so that the folder has tokenizer.json"
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
