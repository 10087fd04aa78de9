"""WordPiece tokenizers from a folder that has only vocab.txt, as BERT's and MPNet's older checkpoints do.

The parts are those that transformers makes of the same files: BERT's normalizer, which tokenizer_config.json may tell
to keep case or accents, BERT's way to split words, and the special tokens that begin and end a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from slipstream.config.tokenizer_class import BERT_LIKE, GENERIC, tokenizer_class
from slipstream.config.vocabulary import read_vocabulary_lines
from slipstream.errors import BadTokenizer

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
    """The tokenizer and its special tokens by role. `settings` are tokenizer_config.json's, `given` the special tokens
    that the folder's files name."""
    kind = tokenizer_class(dict(settings), _object(folder / "config.json"))
    if kind not in _SPECIAL:
        raise BadTokenizer(
            f"{folder} has no tokenizer.json, and its vocab.txt is a {kind}'s, which is not built here; BERT's and "
            "MPNet's are: save the tokenizer once with transformers, so that the folder has tokenizer.json"
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
    _add_tokens(folder, backend, special, kind)
    _set_ends(folder, backend, special, kind)
    return backend, special


def _add_tokens(folder: Path, backend: Backend, special: Mapping[str, str], kind: str) -> None:
    """added_tokens.json has words behind the vocabulary; then the special tokens, which are never split."""
    roles = set(special.values())
    added = _object(folder / "added_tokens.json")
    if not all(isinstance(number, int) for number in added.values()):
        raise BadTokenizer(f"{folder / 'added_tokens.json'} does not map words to numbers; download it again")
    for word, number in sorted(added.items(), key=lambda item: int(item[1])):
        is_special = word in roles
        backend.add_tokens([AddedToken(word, special=is_special, normalized=not is_special)])
        if backend.token_to_id(word) != number:
            raise BadTokenizer(
                f"{folder / 'added_tokens.json'} says that {word!r} is token {number}, and behind vocab.txt it is "
                f"{backend.token_to_id(word)}; download both again"
            )
    for role, word in special.items():
        eats_space = role == "mask_token" and kind == "MPNetTokenizer"
        if backend.token_to_id(word) is not None:
            backend.add_special_tokens([AddedToken(word, special=True, normalized=False, lstrip=eats_space)])


def _set_ends(folder: Path, backend: Backend, special: Mapping[str, str], kind: str) -> None:
    ends: dict[str, tuple[str, int]] = {}
    for role in ("cls_token", "sep_token", "unk_token"):
        number = backend.token_to_id(special[role])
        if number is None:
            raise BadTokenizer(
                f"{folder / 'vocab.txt'} lacks {special[role]}, the {role} of a {kind}; download it again, or name the "
                "token in tokenizer_config.json"
            )
        ends[role] = special[role], number
    cls, sep = ends["cls_token"], ends["sep_token"]
    if kind == "MPNetTokenizer":
        backend.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=True, add_prefix_space=False)
        return
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls[0]}:0 $A:0 {sep[0]}:0",
        pair=f"{cls[0]}:0 $A:0 {sep[0]}:0 $B:1 {sep[0]}:1",
        special_tokens=[cls, sep],
    )


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; an absent file is an empty one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadTokenizer(f"{path} cannot be read: {error}; download it again") from None
    return value if isinstance(value, dict) else {}
