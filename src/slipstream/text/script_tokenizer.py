"""ScriptTokenizer: the methods of a transformers tokenizer that scripts use, over our `Tokenizer`.

Names, defaults and results are those of transformers 5: `decode` keeps special tokens, `apply_chat_template` returns a
dict of ids unless told otherwise, and control tokens in messages are tokens.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer as Backend

from slipstream.base.errors import BadTokenizer, InvalidParams
from slipstream.checkpoint.locate import is_gguf
from slipstream.text.chat_template import render_chat
from slipstream.text.guarded import library_errors
from slipstream.text.tokenizer import SPECIAL_NAMES, Tokenizer

_WITH_TYPES = ("Bert", "Electra", "Albert", "Deberta", "XLNet", "MobileBert", "RoFormer")  # token_type_ids by default
_IDS, _TYPES, _MASK = "input_ids", "token_type_ids", "attention_mask"


class Tokenized(dict[str, Any]):
    """Lists or tensors by name, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> Tokenized:
        """Torch tensors on another device."""
        return Tokenized({name: value.to(device) for name, value in self.items()})


class ScriptTokenizer:
    """Safe to call from several threads."""

    is_fast = True

    def __init__(self, tokenizer: Tokenizer, name_or_path: str = "") -> None:
        settings = tokenizer.settings
        self.tokenizer = tokenizer
        self.name_or_path = name_or_path
        self.padding_side: str = settings.get("padding_side") or "right"
        self.truncation_side: str = settings.get("truncation_side") or "right"
        self.model_max_length = int(settings.get("model_max_length") or 1e30)
        self.clean_up_tokenization_spaces = bool(settings.get("clean_up_tokenization_spaces"))
        has_types = str(settings.get("tokenizer_class", "")).startswith(_WITH_TYPES)
        names = settings.get("model_input_names") or [_IDS, *([_TYPES] if has_types else []), _MASK]
        self.model_input_names = list(names)
        self._special = dict(tokenizer.special_tokens)
        self._lock = threading.Lock()
        self._copy: Backend | None = None  # for truncation, whose settings are those of the backend

    # Encoding

    def __call__(
        self,
        text: str | Sequence[str] | Sequence[Sequence[str]],
        text_pair: str | Sequence[str] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | Literal["longest", "max_length", "do_not_pad"] = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: Literal["pt", "np"] | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        **unknown: Any,
    ) -> Tokenized:
        for name, value in unknown.items():
            if value not in (None, False, 0) and not (name == "verbose" and value is True):
                raise InvalidParams(
                    f"the tokenizer has no argument {name}; to_transformers() gives one with it", param=name
                )
        is_batch = not isinstance(text, str)
        texts: list[Any] = [tuple(each) if isinstance(each, list) else each for each in text] if is_batch else [text]
        if text_pair is not None:
            pairs = list(text_pair) if is_batch else [text_pair]
            texts = list(zip(texts, pairs, strict=True))
        found = self._encodings(texts, add_special_tokens, self._limit(truncation, max_length), truncation)
        columns: dict[str, list[list[Any]]] = {_IDS: [each.ids for each in found]}
        if _TYPES in self.model_input_names if return_token_type_ids is None else return_token_type_ids:
            columns[_TYPES] = [each.type_ids for each in found]
        if _MASK in self.model_input_names if return_attention_mask is None else return_attention_mask:
            columns[_MASK] = [each.attention_mask for each in found]
        if return_offsets_mapping:
            columns["offset_mapping"] = [each.offsets for each in found]
        fillers = {_IDS: self.pad_token_id, _TYPES: self.pad_token_type_id, _MASK: 0, "offset_mapping": (0, 0)}
        limit = self.model_max_length if max_length is None else max_length
        pad_lists(columns, fillers, padding, limit, pad_to_multiple_of, padding_side or self.padding_side)
        result: dict[str, Any] = dict(columns)
        if return_length:
            result["length"] = [len(ids) for ids in columns[_IDS]]
        if return_tensors is not None:
            return Tokenized({name: make_tensor(value, return_tensors) for name, value in result.items()})
        return Tokenized(result if is_batch else {name: value[0] for name, value in result.items()})

    def encode(self, text: str, text_pair: str | None = None, add_special_tokens: bool = True, **how: Any) -> Any:
        """Token ids: a list, or a tensor [1, length] with `return_tensors`."""
        return self(text, text_pair, add_special_tokens=add_special_tokens, **how)[_IDS]

    def tokenize(self, text: str, pair: str | None = None, add_special_tokens: bool = False) -> list[str]:
        given: Any = [text] if pair is None else [(text, pair)]
        tokens: list[str] = self.tokenizer.encodings(given, add_special_tokens, words=True)[0].tokens
        return tokens

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        number: int = self.tokenizer.backend.num_special_tokens_to_add(pair)
        return number

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        padding: bool | Literal["longest", "max_length", "do_not_pad"] = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: Literal["pt", "np"] | None = None,
        return_dict: bool = True,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> Any:
        """The text of one conversation, or of each of several; with `tokenize` its token ids, in a dict unless
        `return_dict` is False."""
        is_batch = bool(conversation) and not isinstance(conversation[0], Mapping)
        variables |= {} if documents is None else {"documents": documents}
        template = chat_template or self.tokenizer.chat_template(with_tools=bool(tools))
        texts = [
            render_chat(
                template,
                each,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                special_tokens=self._special,
                **variables,
            )
            for each in (conversation if is_batch else [conversation])
        ]
        rendered: Any = texts if is_batch else texts[0]
        if not tokenize:
            return rendered
        how: dict[str, Any] = {"padding": padding, "truncation": truncation, "max_length": max_length}
        more = {"return_tensors": return_tensors, **how, **(tokenizer_kwargs or {})}
        found = self(rendered, add_special_tokens=False, **more)
        return found if return_dict else found[_IDS]

    # Decoding

    def decode(
        self, token_ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> Any:
        """The text of token ids, or of each of several lists of them. Lists, arrays and tensors are accepted."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else ids
        if len(ids) and not isinstance(ids[0], int):
            return [self.decode(each, skip_special_tokens, clean_up_tokenization_spaces) for each in ids]
        text = self.tokenizer.decode(ids, skip_special_tokens)
        cleans = (
            self.clean_up_tokenization_spaces if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        )
        is_bpe = type(self.tokenizer.backend.model).__name__ == "BPE"  # whose spaces are exact
        return _cleaned(text) if cleans and not is_bpe else text

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **how: Any) -> list[str]:
        return [self.decode(each, skip_special_tokens, **how) for each in sequences]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        decoder = self.tokenizer.backend.decoder
        text: str = " ".join(tokens) if decoder is None else decoder.decode(list(tokens))
        return text

    # The vocabulary

    def __len__(self) -> int:
        size: int = self.tokenizer.backend.get_vocab_size(with_added_tokens=True)
        return size

    def __bool__(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """Without added tokens."""
        size: int = self.tokenizer.backend.get_vocab_size(with_added_tokens=False)
        return size

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.tokenizer.backend.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        found: dict[int, Any] = self.tokenizer.backend.get_added_tokens_decoder()
        return found

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: number for number, token in sorted(self.added_tokens_decoder.items())}

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or of each; that of the unknown token, or None, for one that is not in the vocabulary."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(each) for each in tokens]
        found = self.tokenizer.backend.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        if isinstance(ids, int):
            return self.tokenizer.piece(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.tokenizer.piece(int(each)) for each in ids if int(each) not in skipped]

    # Special tokens, by the names bos_token, bos_token_id and so on

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return {name: self._special[name] for name in SPECIAL_NAMES if name in self._special}

    @property
    def all_special_tokens(self) -> list[str]:
        settings = self.tokenizer.settings
        extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
        extra = list(extra.values()) if isinstance(extra, dict) else extra
        texts = (each.get("content") if isinstance(each, dict) else each for each in extra)
        return list(dict.fromkeys([*self.special_tokens_map.values(), *(text for text in texts if text)]))

    @property
    def all_special_ids(self) -> list[int]:
        ids: list[int] = self.convert_tokens_to_ids(self.all_special_tokens)
        return ids

    @property
    def chat_template(self) -> str | None:
        return self.tokenizer.chat_template()

    @chat_template.setter
    def chat_template(self, template: str) -> None:
        self.tokenizer.chat_templates = {"default": template}

    def to_transformers(self) -> Any:
        """Returns the tokenizer of the transformers library from the same files, for methods that are not here."""
        try:
            import transformers
        except ImportError:
            raise BadTokenizer(
                "the tokenizer of the transformers library needs it installed: pip install 'slipstream[transformers]'"
            ) from None
        path = Path(self.name_or_path)
        if path.suffix == ".json":
            tokenizer_class: Any = transformers.PreTrainedTokenizerFast  # its constructor has no types
            return tokenizer_class(tokenizer_file=str(path))
        if path.is_file() and is_gguf(path):
            return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)

    def __getattr__(self, name: str) -> Any:
        """Special tokens and their ids; None for those that the tokenizer does not have."""
        base = name.removesuffix("_id")
        if base not in SPECIAL_NAMES:
            raise AttributeError(f"the tokenizer has no attribute {name!r}; to_transformers() gives one with it")
        text = self._special.get(base)
        return text if name == base or text is None else self.tokenizer.backend.token_to_id(text)

    def __setattr__(self, name: str, value: Any) -> None:
        """`pad_token = eos_token` and the like; the token must be in the vocabulary."""
        base = name.removesuffix("_id")
        if base not in SPECIAL_NAMES:
            super().__setattr__(name, value)
            return
        text = self.tokenizer.piece(value) if name != base and value is not None else value
        if text is not None and self.tokenizer.backend.token_to_id(text) is None:
            raise InvalidParams(f"{name}: the vocabulary has no token {value!r:.50}; give one that it has", param=name)
        self._special.pop(base, None)
        if text is not None:
            self._special[base] = text

    # Truncation and padding

    def _limit(self, truncation: bool | str, max_length: int | None) -> int | None:
        """The number of tokens to truncate to; None: do not."""
        if truncation in (False, "do_not_truncate", None):
            return None
        if truncation not in (True, "longest_first", "only_first", "only_second"):
            raise InvalidParams(f"truncation is {truncation!r:.50}; give True, False or a strategy", param="truncation")
        limit = self.model_max_length if max_length is None else max_length
        return None if limit > NO_LENGTH else limit

    def _encodings(
        self, texts: list[Any], add_special_tokens: bool, limit: int | None, strategy: bool | str
    ) -> list[Any]:
        if limit is None:
            return self.tokenizer.encodings(texts, add_special_tokens, words=True)
        with self._lock:
            if self._copy is None:
                self._copy = Backend.from_str(self.tokenizer.backend.to_str())
            how = "longest_first" if strategy is True else str(strategy)
            self._copy.enable_truncation(limit, strategy=how, direction=self.truncation_side)
            with library_errors():
                found: list[Any] = self._copy.encode_batch(texts, add_special_tokens=add_special_tokens)
            return found

    pad_token_type_id = 0


@functools.lru_cache(maxsize=8)
def script_tokenizer(tokenizer: Tokenizer, name_or_path: str = "") -> ScriptTokenizer:
    """The same object for the same tokenizer, so that what a script sets stays set."""
    return ScriptTokenizer(tokenizer, name_or_path)


def _cleaned(text: str) -> str:
    """Without the spaces that a decoder of words puts before punctuation and contractions, as transformers does."""
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text


# Lists of token ids of several lengths: padding, and tensors of them.

NO_LENGTH = 10**20
"""Transformers stores a larger number, 1e30, for a tokenizer without a maximum length."""


def pad_lists(
    columns: dict[str, list[list[Any]]],
    fillers: Mapping[str, Any],
    padding: bool | str | None,
    limit: int,
    multiple: int | None,
    side: str,
) -> None:
    """Makes the lists of every column as long as the longest of the first column, or, with max_length, as `limit`.
    `multiple`: of which the length is."""
    if padding in (False, "do_not_pad", None):
        return
    if padding not in (True, "longest", "max_length"):
        raise InvalidParams(f"padding is {padding!r:.50}; give True, False, longest or max_length", param="padding")
    first = next(iter(columns))
    if fillers[first] is None:
        raise InvalidParams("the tokenizer has no pad_token; set tokenizer.pad_token, to eos_token for example")
    length = max((len(ids) for ids in columns[first]), default=0)
    if padding == "max_length" and limit <= NO_LENGTH:
        length = max(length, limit)
    if multiple:
        length = -(-length // multiple) * multiple
    for name, lists in columns.items():
        filled = ([fillers[name]] * (length - len(values)) for values in lists)
        pairs = zip(lists, filled, strict=True)
        columns[name] = [fill + values if side == "left" else values + fill for values, fill in pairs]


def make_tensor(value: list[Any], kind: str) -> Any:
    """A tensor of int64: of torch for pt, of numpy for np."""
    torch = sys.modules.get("torch")
    if kind not in ("pt", "np") or (kind == "pt" and torch is None):
        raise InvalidParams(f"return_tensors is {kind!r:.50}; give pt, where torch is loaded, or np")
    try:
        array = np.array(value, np.int64)
    except ValueError:
        raise InvalidParams("texts of several lengths make no tensor; set padding=True") from None
    return array if torch is None or kind == "np" else torch.from_numpy(array)
