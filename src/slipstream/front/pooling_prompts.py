"""PoolingPromptReader: turns pooling prompts (texts, pairs, token ids, objects) into token ids.

A call may have thousands of prompts, so they are checked and tokenised in batches: a few C calls per prompt.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.base.errors import InvalidPrompt, PromptTooLong, UserError
from slipstream.checkpoint.pooling_info import Role
from slipstream.engine.model_description import ModelDescription
from slipstream.params.pooling import PoolingParams
from slipstream.text.excerpt import Pieces
from slipstream.text.guarded import Guarded, plain
from slipstream.text.tokenizer import Tokenizer

# a text, token ids, an object with either, or a pair of texts
PoolingPrompt = str | Sequence[int] | Mapping[str, Any] | tuple[str, str] | NDArray[Any]

NO_ROLE = Role()
_MAX_SPECIAL = 4  # upper bound of the special tokens that a tokenizer adds to a text
_TRUNCATE = "shorten it or set truncate_prompt_tokens"
_Cut = tuple[int | None, str]  # the length to which a text is truncated (None: not), and truncation_side


class PoolingBatch(msgspec.Struct, frozen=True):
    """Prompts of one kind and their resolved parameters: one object for all, or one per prompt."""

    prompts: Sequence[PoolingPrompt]
    params: PoolingParams | Sequence[PoolingParams]
    prefix: str = ""  # put before texts
    role: Role = NO_ROLE  # of texts, in late interaction; token ids are used unchanged
    first: int = 0  # index of the first prompt among those of the call, where this batch is a part of them
    total: int | None = None  # number of the call's prompts of this kind; None: this batch has all of them

    @property
    def num_of_call(self) -> int:
        return len(self.prompts) if self.total is None else self.total

    def each_params(self) -> Sequence[PoolingParams]:
        return [self.params] if isinstance(self.params, PoolingParams) else self.params


class EncodedPrompt(msgspec.Struct, frozen=True, gc=False):
    """One prompt with its token ids."""

    index: int  # index in its batch
    text: str | None
    ids: array[int]
    type_start: int | None  # where the second text of a pair begins: token types are 1 from there on
    params: PoolingParams
    num_seen: int | None = None  # attention sees the first `num_seen` tokens only; None: all


class PoolingPromptReader:
    def __init__(self, description: ModelDescription, tokenizer: Tokenizer | None) -> None:
        assert description.pooling is not None, f"{description.name} only generates"
        self.description = description
        self.pooling = description.pooling
        self.tokenizer = tokenizer
        self._pieces: Pieces | None = None  # built for the first text

    def read(self, batch: PoolingBatch, part: slice) -> list[EncodedPrompt]:
        """Returns the encoded prompts of a part of the batch. Errors name the prompt by its index in the call."""
        prompts, prefix, role = batch.prompts[part], batch.prefix, batch.role
        params = [batch.params] * len(prompts) if isinstance(batch.params, PoolingParams) else [*batch.params[part]]
        start, total = part.start, batch.num_of_call
        prepared: list[EncodedPrompt | None] = [None] * len(prompts)
        texts: dict[_Cut, list[int]] = {}  # indices of texts, grouped by truncation
        pairs: dict[_Cut, list[int]] = {}
        shown: list[str | None] = [None] * len(prompts)
        index = 0
        try:
            for index, prompt in enumerate(prompts):
                kind = type(prompt)
                if kind is list or kind is array or kind is np.ndarray:
                    ids = self._truncate(_ids(prompt), params[index])
                    prepared[index] = EncodedPrompt(start + index, None, ids, None, params[index])
                elif kind is tuple and _is_pair(prompt):
                    _check_pair(prompt)
                    cut = self._limit(params[index], NO_ROLE)
                    self._check_size(cut, *cast(tuple[str, str], prompt))
                    pairs.setdefault(cut, []).append(index)
                elif isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
                    whole = _ids(prompt["prompt_token_ids"])
                    ids = self._truncate(whole, params[index])
                    begin = self._type_start(prompt.get("token_type_ids"), len(whole))
                    if begin is not None and params[index].truncation_side == "left":
                        begin = max(0, begin - (len(whole) - len(ids)))
                    begin = None if begin is not None and begin >= len(ids) else begin
                    prepared[index] = EncodedPrompt(start + index, prompt.get("prompt"), ids, begin, params[index])
                elif isinstance(text := prompt.get("prompt") if isinstance(prompt, Mapping) else prompt, str):
                    if isinstance(prompt, Mapping) and prompt.get("token_type_ids") is not None:
                        raise InvalidPrompt(
                            "token_type_ids is given with a text; give prompt_token_ids too, or two texts as a pair"
                        )
                    shown[index] = text
                    cut = self._limit(params[index], role)
                    self._check_size(cut, text)
                    texts.setdefault(cut, []).append(index)
                elif isinstance(prompt, Sequence):
                    ids = self._truncate(_ids(prompt), params[index])
                    prepared[index] = EncodedPrompt(start + index, None, ids, None, params[index])
                else:
                    raise InvalidPrompt(
                        f"a prompt is a text, a list of token ids, a pair of texts or an object with prompt or "
                        f"prompt_token_ids; this is {type(prompt).__name__}"
                    )
            if prefix and not self.pooling.include_prompt and (texts or pairs):
                before = self.prefix_length(prefix)
                for index in (index for indices in (*texts.values(), *pairs.values()) for index in indices):
                    params[index] = with_skipped_tokens(params[index], before)
            for (limit, side), indices in texts.items():
                given = [prefix + text if prefix else text for text in (cast(str, shown[index]) for index in indices)]
                for index, found in zip(indices, self._encode(self._case(given), limit, side), strict=True):
                    ids, seen = self._with_role(role, found) if role is not NO_ROLE else (array("i", found), None)
                    text = plain(cast(str, shown[index]))
                    prepared[index] = EncodedPrompt(start + index, text, ids, None, params[index], seen)
            for (limit, side), indices in pairs.items():
                two = [self._pair(prompts[index], prefix) for index in indices]
                for index, (found, begin) in zip(indices, self._encoder().pairs(two, limit, side=side), strict=True):
                    begin = begin if self.pooling.types_pairs else None
                    prepared[index] = EncodedPrompt(start + index, None, array("i", found), begin, params[index])
            done = cast(list[EncodedPrompt], prepared)
            lengths = [len(one.ids) for one in done]
            if min(lengths) < 1 or max(lengths) > self.description.max_model_len:
                index = next(i for i, length in enumerate(lengths) if not 0 < length <= self.description.max_model_len)
                self._raise_for_length(lengths[index])
            index = -1
            self._check_range(done)
        except UserError as error:
            if index < 0:
                raise
            raise error.of_prompt(batch.first + start + index, total) from None
        return done

    def text_ids(self, text: str, params: PoolingParams, prefix: str = "") -> list[int]:
        """Returns the token ids of one text: the same as `read` gives, by a faster path for requests of one text."""
        limit, side = cut = self._limit(params, NO_ROLE)
        self._check_size(cut, text)
        (ids,) = self._encode(self._case([prefix + text]), limit, side)
        if not 0 < len(ids) <= self.description.max_model_len:
            self._raise_for_length(len(ids))
        if max(ids) >= self.description.vocab_size:
            raise InvalidPrompt(f"token id {max(ids)} is out of vocabulary; {self.description.known_ids}")
        return ids

    def prefix_length(self, prefix: str) -> int:
        """The number of a text's tokens that belong to its prefix, with the special token at the start.

        Counted as sentence-transformers does: the tokens of the prefix alone, without the special token at the end.
        """
        ids = self._encode(self._case([prefix]), self.pooling.max_seq_length, "right")[0]
        assert self.tokenizer is not None
        return len(ids) - (bool(ids) and self.tokenizer.is_special(ids[-1]))

    def max_num_tokens(self, text: str, params: PoolingParams, role: Role) -> int:
        """An upper bound of the tokens of a text, from its bytes: a token has at least one."""
        limit = self._limit(params, role)[0]
        length = min(len(text.encode(errors="replace")) + _MAX_SPECIAL, self.description.max_model_len)
        return max(
            length if limit is None else min(length, limit + 1), min(role.filled, self.description.max_model_len)
        )

    def _truncate(self, ids: array[int], params: PoolingParams) -> array[int]:
        keep = params.truncate_prompt_tokens
        if keep is None or params.truncation_side == "never":
            return ids
        keep = keep if keep > 0 else self.description.max_model_len
        return ids[-keep:] if params.truncation_side == "left" else ids[:keep]

    def _limit(self, params: PoolingParams, role: Role) -> _Cut:
        """The length to which a text is truncated: of the parameters, else of its role or the model's files."""
        side = params.truncation_side
        if side == "never":
            return None, side
        keep = params.truncate_prompt_tokens
        if keep is None:
            keep = self.pooling.max_seq_length if role.length is None else role.length
            if keep is None:
                return None, side
        keep = self.description.max_model_len if keep < 0 else min(keep, self.description.max_model_len)
        return (keep if role.token_id is None else max(keep - 1, 1)), side

    def _with_role(self, role: Role, found: list[int]) -> tuple[array[int], int | None]:
        """Adds the role's marker token and padding tokens. Returns the ids and `num_seen`."""
        ids = array("i", found)
        if role.token_id is not None:
            ids.insert(1, role.token_id)
        missing = min(role.filled, self.description.max_model_len) - len(ids)
        if role.filler_id is None or missing <= 0:
            return ids, None
        num_seen = None if role.filler_is_seen else len(ids)
        ids.extend([role.filler_id] * missing)
        return ids, num_seen

    def _type_start(self, types: object, count: int) -> int | None:
        if types is None:
            return None
        found = types.tolist() if isinstance(types, np.ndarray) else types
        found = list(found) if isinstance(found, Sequence) else []
        num_zeros = found.count(0)
        if len(found) != count or found != [0] * num_zeros + [1] * (count - num_zeros):
            raise InvalidPrompt(
                f"token_type_ids must be {count} numbers, zeros first and then ones; correct or remove them"
            )
        if num_zeros == count:
            return None
        if not self.pooling.has_types:
            raise InvalidPrompt(
                f"token_type_ids has ones, and {self.description.name} has one token type only; remove them"
            )
        return num_zeros

    def _pair(self, pair: object, prefix: str) -> tuple[str, str]:
        """The two texts to encode; only the first has the prefix."""
        first, second = cast(tuple[str, str], pair)
        first, second = self._case([prefix + first, second])
        return first, second

    def _case(self, texts: list[str]) -> list[str]:
        if not self.pooling.lower_case:
            return texts
        # the spans of a guarded text are offsets into it as it is
        return [text if isinstance(text, Guarded) else text.lower() for text in texts]

    def text_to_read(self, text: str, params: PoolingParams) -> str:
        """Returns the part of a text that must be tokenised when truncate_prompt_tokens applies to its token ids.

        Raises for a text that is far too long, as `read` does.
        """
        keep = params.truncate_prompt_tokens
        if keep is None or params.truncation_side == "never":
            self._check_size((None, "never"), text)
            return text
        excerpts = self._encoder().excerpts
        part = excerpts.end if params.truncation_side == "left" else excerpts.beginning
        return part(text, keep if keep > 0 else self.description.max_model_len)

    def beginnings(self, texts: Sequence[str], limit: int) -> list[str]:
        """Returns the beginning of each text that has its first `limit` tokens."""
        encoder = self._encoder()
        short = [encoder.excerpts.beginning(text, limit) for text in texts]
        encoder.tokenizer.encodings(short, add_special_tokens=False)  # raises for a text that cannot be encoded
        found = encoder.tokenizer.backend.encode_batch(short, add_special_tokens=False)  # has character offsets
        return [
            text[: encoding.offsets[limit - 1][1]] if len(encoding.ids) > limit else text
            for text, encoding in zip(texts, found, strict=True)
        ]

    def _encode(self, texts: list[str], limit: int | None, side: str) -> list[list[int]]:
        found = self._encoder().texts(texts, limit, side=side)
        if side == "never" and (limit := self.pooling.max_seq_length) is not None:
            for ids in found:
                if len(ids) > limit:
                    raise PromptTooLong(
                        f"the prompt has {len(ids)} tokens, {self.description.name} reads {limit} of a text; "
                        f"{_TRUNCATE}"
                    )
        return found

    def _check_size(self, cut: _Cut, *texts: str) -> None:
        """Raises for texts that are far too long and not truncated, without tokenising all of them."""
        limit, max_seq_length = self.description.max_model_len, self.pooling.max_seq_length
        for text in texts if cut[0] is None else ():
            if self._encoder().excerpts.exceeds(text, limit):
                fact = f"the prompt has {len(text)} characters and more than {limit} tokens"
                if cut[1] == "never" and max_seq_length is not None:
                    raise PromptTooLong(
                        f"{fact}, {self.description.name} reads {max_seq_length} of a text; {_TRUNCATE}"
                    )
                limits = f"{self.description.name}'s maximum context length is {limit}"
                raise PromptTooLong(f"{fact}, and {limits}. {self.description.too_long_hint}")

    def _encoder(self) -> Pieces:
        if self._pieces is None:
            if self.tokenizer is None:
                raise InvalidPrompt(
                    "the prompt is text and `skip_tokenizer_init=True` is set; give token ids or unset it"
                )
            self._pieces = Pieces(self.tokenizer)
        return self._pieces

    def _raise_for_length(self, length: int) -> None:
        if not length:
            raise InvalidPrompt(
                f"the prompt has no tokens, and the tokenizer of {self.description.name} adds none to an empty text; "
                "give at "
                "least one token or a word"
            )
        raise PromptTooLong(
            f"the prompt has {length} tokens, and {self.description.name}'s maximum context length is "
            f"{self.description.max_model_len}. {self.description.too_long_hint}"
        )

    def _check_range(self, prepared: list[EncodedPrompt]) -> None:
        """Checks the ids of all prompts in one numpy call: a check per prompt would cost more than tokenising it."""
        ids = np.frombuffer(b"".join([one.ids for one in prepared]), np.int32)
        if ids.min() < 0 or ids.max() >= self.description.vocab_size:
            for one in prepared:
                for token in one.ids:
                    if not 0 <= token < self.description.vocab_size:
                        raise InvalidPrompt(f"token id {token} is out of vocabulary; {self.description.known_ids}")


@functools.lru_cache(64)
def with_skipped_tokens(params: PoolingParams, count: int) -> PoolingParams:
    """Cached, so that equal results are one object: PoolingPrompts compares parameters by identity."""
    return params if params.task not in (None, "embed", "classify") else params.with_changes(skip_tokens=count)


@functools.lru_cache(4096)
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"{count}i")


def _ids(given: object) -> array[int]:
    try:
        if type(given) is list:  # twice as fast as array() of the list
            return array("i", _packer(len(given)).pack(*given))
    except (struct.error, TypeError):
        pass  # the conversion below raises the right error
    try:
        return array("i", given.tolist() if isinstance(given, np.ndarray) else cast(Sequence[int], given))
    except OverflowError:
        raise InvalidPrompt("prompt_token_ids has a number above 2**31; give token ids") from None
    except (TypeError, ValueError):
        raise InvalidPrompt(
            f"prompt_token_ids is {type(given).__name__} and not a list of integers; give token ids"
        ) from None


def _is_pair(prompt: object) -> TypeGuard[tuple[object, object]]:
    return isinstance(prompt, tuple) and len(prompt) == 2 and any(isinstance(one, str) for one in prompt)


def _check_pair(pair: tuple[object, object]) -> None:
    for one in pair:
        if not isinstance(one, str):
            raise InvalidPrompt(f"a pair has two texts, and one of these is {type(one).__name__}; give texts")
