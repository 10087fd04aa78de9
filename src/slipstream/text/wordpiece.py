"""Builds WordPiece tokenizers from vocab.txt, for older checkpoints of BERT and MPNet without tokenizer.json.

The components are those that transformers builds from the same files: BERT's normalizer with the settings of
tokenizer_config.json for case and accents, BERT's pre-tokenizer, and the special tokens around a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from slipstream.config.tokenizer_class import BERT_LIKE, GENERIC, tokenizer_class
from slipstream.config.vocabulary import read_vocabulary_lines
from slipstream.errors import BadTokenizer
from slipstream.text.vocab_files import add_tokens, read_object, require_token

_BERT = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
}  # fmt: skip
_MPNET = {
    "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "[UNK]",
    "pad_token": "<pad>", "mask_token": "<mask>",
}  # fmt: skip
_SPECIAL: dict[str, Mapping[str, str]] = {
    **dict.fromkeys(BERT_LIKE | {"DistilBertTokenizer", GENERIC}, _BERT),
    "MPNetTokenizer": _MPNET,
}


def wordpiece_tokenizer(
    folder: Path, settings: Mapping[str, Any], given: Mapping[str, str]
) -> tuple[Backend, dict[str, str]]:
    """Returns the tokenizer and its special tokens by role. `settings`: tokenizer_config.json; `given`: the special
    tokens in the folder's files."""
    kind = tokenizer_class(dict(settings), read_object(folder / "config.json"))
    if kind not in _SPECIAL:
        raise BadTokenizer(
            f"{folder} has no tokenizer.json, and its vocab.txt is for {kind}; only tokenizers of BERT and MPNet are "
            "built from that file: save the tokenizer once with transformers, so that the folder has tokenizer.json"
        )
    special = {**_SPECIAL[kind], **given}
    vocabulary = read_vocabulary_lines(folder / "vocab.txt")
    backend = Backend(models.WordPiece(vocabulary, unk_token=special["unk_token"]))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
        strip_accents=settings.get("strip_accents"),
        lowercase=bool(settings.get("do_lower_case", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    add_tokens(folder, backend, special, mask_eats_space=kind == "MPNetTokenizer")
    _set_ends(folder, backend, special, kind)
    return backend, special


def _set_ends(folder: Path, backend: Backend, special: Mapping[str, str], kind: str) -> None:
    cls, sep, _ = (
        require_token(folder, backend, special, role, kind) for role in ("cls_token", "sep_token", "unk_token")
    )
    if kind == "MPNetTokenizer":
        backend.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=True, add_prefix_space=False)
        return
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls[0]}:0 $A:0 {sep[0]}:0",
        pair=f"{cls[0]}:0 $A:0 {sep[0]}:0 $B:1 {sep[0]}:1",
        special_tokens=[cls, sep],
    )
