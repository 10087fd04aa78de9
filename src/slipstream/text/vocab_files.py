"""Shared by the tokenizers built from a vocabulary file: added tokens, special tokens, and the JSON files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from slipstream.config.json_file import load_json
from slipstream.errors import BadTokenizer


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
