"""Shared by the tokenizers built from a vocabulary file: added tokens, special tokens, and the JSON files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from slipstream.base.errors import BadTokenizer
from slipstream.base.files import load_json
from slipstream.checkpoint.late_interaction import read_vocabulary_lines
from slipstream.checkpoint.sentence_modules import BERT_LIKE, GENERIC, tokenizer_class


def add_tokens(folder: Path, backend: Backend, special: Mapping[str, str], *, mask_eats_space: bool = False) -> None:
    """Adds the tokens of added_tokens.json, whose ids follow the vocabulary, and the special tokens.

    `mask_eats_space`: the space before a mask token belongs to the token.
    """
    roles = set(special.values())
    added = read_object(folder / "added_tokens.json")
    if not all(isinstance(number, int) for number in added.values()):
        raise BadTokenizer(f"{folder / 'added_tokens.json'} does not map tokens to ids; download it again")
    for word, number in sorted(added.items(), key=lambda item: int(item[1])):
        is_special = word in roles
        backend.add_tokens([AddedToken(word, special=is_special, normalized=not is_special)])
        if backend.token_to_id(word) != number:
            raise BadTokenizer(
                f"{folder / 'added_tokens.json'} has {word!r} as token {number}, and after the vocabulary it is "
                f"{backend.token_to_id(word)}; download both files again"
            )
    for role, word in special.items():
        eats_space = role == "mask_token" and mask_eats_space
        if backend.token_to_id(word) is not None:
            backend.add_special_tokens([AddedToken(word, special=True, normalized=False, lstrip=eats_space)])


def require_token(folder: Path, backend: Backend, special: Mapping[str, str], role: str, kind: str) -> tuple[str, int]:
    """Returns a special token and its id. Raises BadTokenizer where the vocabulary lacks it."""
    number = backend.token_to_id(special[role])
    if number is None:
        raise BadTokenizer(
            f"the vocabulary of {folder} lacks {special[role]}, the {role} of a {kind}; download it again, or name the "
            "token in tokenizer_config.json"
        )
    return special[role], number


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; a missing file is an empty object."""
    try:
        value = load_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadTokenizer(f"{path} cannot be read: {error}; download it again") from None
    return value if isinstance(value, dict) else {}


# Builds WordPiece tokenizers from vocab.txt, for older checkpoints of BERT and MPNet without tokenizer.json.
#
# The components are those that transformers builds from the same files: BERT's normalizer with the settings of
# tokenizer_config.json for case and accents, BERT's pre-tokenizer, and the special tokens around a text.

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


# Builds RoBERTa's byte-level BPE from vocab.json and merges.txt, for older checkpoints without tokenizer.json.

_KIND = "RobertaTokenizer"
_ROBERTA_BPE_SPECIAL = {
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
    special = {**_ROBERTA_BPE_SPECIAL, **given}
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
