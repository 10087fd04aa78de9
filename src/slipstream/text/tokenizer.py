"""Tokenizer: encodes text to token ids and decodes it, with the `tokenizers` library.

It is loaded from a folder in Hugging Face's layout (tokenizer.json, or the older files of BERT or RoBERTa), from a
tokenizer.json, or from a GGUF file. Special tokens in a text are recognised, and those at the start and the end are
added as the file's post-processor says (add_bos_token in tokenizer_config.json is ignored, as in transformers). The
text of a chat template has its special tokens: encode it with `add_special_tokens=False`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from slipstream.base.errors import BadTokenizer, InvalidPrompt, naming_model
from slipstream.base.files import load_json, read_file, read_utf8
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.locate import is_gguf
from slipstream.checkpoint.sentence_modules import static_folder
from slipstream.text.gguf_vocab import gguf_tokenizer, special_token
from slipstream.text.guarded import Guarded, is_panic, library_errors
from slipstream.text.vocab_files import roberta_tokenizer, wordpiece_tokenizer

_HINT = "pass tokenizer=... with a folder that has one, or skip_tokenizer_init=True and prompts as token ids"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The methods are safe to call from several threads."""

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        # disables settings of tokenizer.json: the engine truncates and pads itself
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.settings: Mapping[str, Any] = {}  # tokenizer_config.json
        self.special_tokens = dict(special_tokens or {})  # by the names in templates: bos_token, eos_token ...
        self.chat_templates = dict(chat_templates or {})
        _make_special(backend, self.special_tokens.values())
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        # the decoder in the format of tokenizer.json; None joins pieces by spaces
        self.decoder_spec: dict[str, Any] | None = backend.decoder and json.loads(backend.decoder.__getstate__())
        self._texts: dict[int, str] = {}  # cache of `text_of`
        self._bytes: dict[int, bytes] = {}  # cache of `bytes_of`
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Loads a tokenizer from a folder, a tokenizer.json or a .gguf file."""
        path = Path(path).expanduser()
        with naming_model(path):
            if path.is_dir():
                return cls.from_folder(path)
            if not path.exists():
                raise BadTokenizer(f"there is no tokenizer at {path}; {_HINT}")
            return cls.from_gguf(GgufFile.open(path)) if is_gguf(path) else cls.from_file(path)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        static = static_folder(folder)
        folder = static or folder
        config = _read_object(folder / "tokenizer_config.json")
        names = {**_special_texts(_read_object(folder / "special_tokens_map.json")), **_special_texts(config)}
        if (folder / "tokenizer.json").is_file():
            backend = _read_backend(folder / "tokenizer.json")
        elif (folder / "vocab.txt").is_file():
            backend, names = wordpiece_tokenizer(folder, config, names)
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            backend, names = roberta_tokenizer(folder, config, names)
        else:
            raise BadTokenizer(f"{folder} has no tokenizer.json{_what_else(folder)}; {_HINT}")
        if static is not None:
            backend.post_processor = None  # no special tokens around a text, as in sentence-transformers
        _declare_added(backend, config.get("added_tokens_decoder"))
        found = cls(backend, names, _chat_templates(folder, config))
        found.settings = config
        return found

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Loads a tokenizer.json, with the other files of its folder."""
        if path.name == "tokenizer.json":
            return cls.from_folder(path.parent)
        return cls(_read_backend(path))

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        fields = file.fields
        named = {f"{short}_token": special_token(fields, long) for short, long in _GGUF_NAMES.items()}
        template = fields.get("tokenizer.chat_template")
        return cls(
            gguf_tokenizer(fields),
            {name: token[0] for name, token in named.items() if token},
            {"default": template} if isinstance(template, str) else {},
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            if not isinstance(text, str):
                raise InvalidPrompt(f"a prompt is of type {type(text).__name__}; give a string")
        if any(isinstance(text, Guarded) for text in texts):
            return [self._encode_one(text, add_special_tokens) for text in texts]
        return [encoding.ids for encoding in self.encodings(texts, add_special_tokens)]

    def _encode_one(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, Guarded):
            return self.encode(text, add_special_tokens)
        ids = text.token_ids()
        if add_special_tokens:
            before, after = self.num_added()
            around = self.encode("a")
            ids = around[:before] + ids + around[len(around) - after :]
        return ids

    def num_added(self) -> tuple[int, int]:
        """The number of special tokens that are added before and after a text."""
        bare, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        for before in range(len(whole) - len(bare) + 1):
            if whole[before : before + len(bare)] == bare:
                return before, len(whole) - len(bare) - before
        return 0, 0

    def encodings(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], add_special_tokens: bool = True, *, words: bool = False
    ) -> list[Any]:
        """The library's encodings of texts or pairs: ids and type_ids; with `words` also word_ids and offsets."""
        encode = self.backend.encode_batch if words else self.backend.encode_batch_fast
        try:
            with library_errors():
                return encode(list(texts), add_special_tokens=add_special_tokens)
        except InvalidPrompt:
            characters = (character for text in texts for part in text for character in part)
            if any("\ud800" <= character <= "\udfff" for character in characters):
                raise InvalidPrompt(
                    "a prompt has an unpaired surrogate, which UTF-8 cannot encode; give valid text"
                ) from None
            raise

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. Unknown ids are skipped."""
        with library_errors("decode tokens"):
            text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def text_of(self, token: int) -> str:
        """The text of one token by itself, special or not."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token], skip_special_tokens=False)
        return text

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token inside a text, which may be a part of a character; empty for an unknown id."""
        found = self._bytes.get(token)
        if found is None:
            piece = self.piece(token)
            own = b"" if piece is None else token_bytes(self.decoder_spec, piece)
            found = self._bytes[token] = self.text_of(token).encode() if own is None else own
        return found

    def is_special(self, token: int) -> bool:
        return token in self.special_ids

    def piece(self, token: int) -> str | None:
        """The token as in the vocabulary, before decoding; None for an unknown id."""
        piece: str | None = self.backend.id_to_token(token)
        return piece

    def chat_template(self, with_tools: bool = False) -> str | None:
        """Returns the chat template; some models have another one for requests with tools."""
        default = self.chat_templates.get("default")
        return self.chat_templates.get("tool_use", default) if with_tools else default

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


_GGUF_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}  # GGUF's spelling


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_buffer(read_file(path))
    except BaseException as error:  # the library raises plain Exceptions, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise BadTokenizer(f"{path} cannot be read as a tokenizer: {error}; download it again, or {_HINT}") from None


def _read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; a missing file is an empty object."""
    try:
        value = load_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadTokenizer(f"{path} cannot be read: {error}; download it again, or {_HINT}") from None
    if not isinstance(value, dict):
        raise BadTokenizer(f"{path} is not a JSON object; download it again, or {_HINT}")
    return value


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns bos_token and the others; each is a text, or an object with the text as content."""
    texts = {}
    for name in SPECIAL_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts


def _declare_added(backend: Backend, declared: Any) -> None:
    """Adds the tokens that tokenizer_config.json declares and tokenizer.json does not."""
    if not isinstance(declared, dict):
        return
    known = backend.get_added_tokens_decoder()
    for number, entry in sorted(declared.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else -1):
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not number.isdecimal():
            raise BadTokenizer(
                f"tokenizer_config.json: added token {number!r} is broken; download it again, or {_HINT}"
            )
        special = bool(entry.get("special"))
        if int(number) in known and known[int(number)].special == special:
            continue
        flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        token = AddedToken(entry["content"], special=special, **flags)
        if special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])


def _make_special(backend: Backend, texts: Any) -> None:
    """Marks tokens with a role as special, also where tokenizer.json does not. Adds no new tokens."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys(texts) if text not in special and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name. Separate files override tokenizer_config.json."""
    whole = folder / "chat_template.jinja"
    paths = {"default": whole} if whole.is_file() else {}
    paths |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    files = {name: _read_template(path) for name, path in paths.items()}
    return files if "default" in files else _configured_templates(folder, config) | files


def _read_template(path: Path) -> str:
    try:
        return read_utf8(path)
    except (OSError, ValueError) as error:
        raise BadTokenizer(f"{path} cannot be read: {error}; download it again, or pass chat_template=...") from None


def _configured_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    template = _read_object(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    named = template if isinstance(template, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in named
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }


def _what_else(folder: Path) -> str:
    for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json"):
        if (folder / name).exists():
            return f" (its {name} must be converted: save the tokenizer once with transformers)"
    return ""


# The bytes of a token of the vocabulary.
#
# A token may be a part of a character, which has bytes but no text. Byte-level vocabularies write each byte as a
# letter; SentencePiece vocabularies have tokens like <0xE2> for bytes without a piece.


def token_bytes(decoder: dict[str, Any] | None, piece: str) -> bytes | None:
    """The bytes of a piece inside a text, by the decoder of tokenizer.json; None if that decoder is not supported.

    At the start of a text some decoders remove a space, which is not considered here.
    """
    if decoder is None:
        return piece.encode()
    for part in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        match part:
            case {"type": "ByteLevel"}:
                return letter_bytes(piece)
            case {"type": "ByteFallback"}:
                if (byte := fallback_byte(piece)) is not None:
                    return bytes([byte])
            case {"type": "Metaspace", "replacement": mark}:
                piece = piece.replace(mark, " ")
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
                piece = piece.replace(old, new)
            case {"type": "Fuse" | "Strip"}:
                pass
            case _:
                return None
    return piece.encode()


_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # the library's parser accepts a plus sign


def fallback_byte(piece: str) -> int | None:
    """The byte of a piece like <0xE2>; None for other pieces."""
    found = _FALLBACK.fullmatch(piece) if len(piece) == 6 else None
    return int(found[1], 16) if found else None


@lru_cache(maxsize=65_536)
def letter_bytes(piece: str) -> bytes:
    """The bytes of a piece in byte letters. A piece with other characters (an added token) is its own text."""
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:
        return piece.encode()


def _byte_letters() -> dict[str, int]:
    """Byte-level vocabularies write printable Latin-1 bytes as themselves and the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()
