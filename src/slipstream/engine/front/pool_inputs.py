"""PoolInputs: what is to be pooled becomes Submits, or a clear exception.

A call brings many prompts at once, so they are checked and encoded by the hundred: a request costs a few C calls.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.config.pooling_info import PoolingInfo, Role
from slipstream.errors import BadTokenizer, InvalidParams, InvalidPrompt, PromptTooLong, UserError
from slipstream.pooling_params import PoolingParams, Task
from slipstream.text.pieces import Pieces
from slipstream.text.tokenizer import Tokenizer

# a text, token ids, an object with either, or a pair of texts
PoolPrompt = str | Sequence[int] | Mapping[str, Any] | tuple[str, str] | NDArray[Any]

_Cut = tuple[int | None, str]  # the length a text is cut to, and from which end

PLAIN = Role()
_FIRST, _MOST = 64, 1024  # prompts encoded at a time: few at first, so that the device has work at once


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """One prompt, ready to be sent."""

    place: int  # among the call's prompts
    text: str | None
    ids: array[int]
    type_start: int | None
    params: PoolingParams
    num_seen: int | None = None  # of its tokens the first so many are seen by all of them; None: each is


class PoolInputs:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        pooling: PoolingInfo,
        max_model_len: int,
        vocab_size: int,
        model_name: str,
        max_positions: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.model_name = model_name
        self.can_grow = max_model_len < max_positions  # whether a higher max_model_len would help
        self._pieces: Pieces | None = None  # made when the first text comes

    def settle(self, params: PoolingParams | None, task: Task | None = None) -> PoolingParams:
        """Parameters whose task is named and which this model can honour."""
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise InvalidParams(f"pooling_params is {type(params).__name__}; give PoolingParams or a list of them")
        if task is not None and params.task not in (None, task):
            raise InvalidParams(
                f"the parameters ask for {params.task} and the call for {task}; use encode, or leave one out"
            )
        task = task or params.task or self.pooling.tasks[0]
        if task not in self.pooling.tasks:
            raise InvalidParams(f"{self.model_name} does not do {task}; it does {', '.join(self._can)}")
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions, task)
        if (params.step_tag_id is not None or params.columns) and task != "token_classify":
            raise InvalidParams(f"step_tag_id and returned_token_ids are for token_classify; the task is {task}")
        if params.columns and max(params.columns) >= self.pooling.num_labels:
            raise InvalidParams(
                f"returned_token_ids holds {max(params.columns)}; {self.model_name} has 0 to "
                f"{self.pooling.num_labels - 1}"
            )
        if (keep := params.truncate_prompt_tokens) is not None and keep > self.max_model_len:
            raise InvalidParams(
                f"truncate_prompt_tokens is {keep}, {self.model_name} takes {self.max_model_len}; give at most that, "
                "or -1"
            )
        return params if params.task == task else params.with_changes(task=task)

    def prepare(
        self,
        prompts: Sequence[PoolPrompt],
        params: PoolingParams | Sequence[PoolingParams],
        *,
        prefix: str = "",
        role: Role = PLAIN,
    ) -> Iterator[Prepared]:
        """The prompts, some at a time, the shorter of them first. `params` are settled; one for all or one each.

        `prefix` is put before texts, `role` is what late interaction makes of them; token ids are taken as they are.
        """
        parts, start, size = [], 0, _FIRST
        while start < len(prompts):
            parts.append(slice(start, start + size))
            start, size = start + size, min(2 * size, _MOST)

        def make(part: slice) -> list[Prepared]:
            chunk = prompts[part]
            each = [params] * len(chunk) if isinstance(params, PoolingParams) else params[part]
            prepared = self._chunk(chunk, each, part.start, len(prompts), prefix, role)
            # equal lengths side by side are computed together where the device likes that
            prepared.sort(key=_length)
            return prepared

        if len(parts) > 1 and isinstance(prompts[0], str | tuple | Mapping):
            yield from _one_ahead(make, parts)
        else:
            for part in parts:
                yield from make(part)

    def text_ids(self, text: str, params: PoolingParams, prefix: str = "") -> list[int]:
        """Of one text. The same ids as `prepare` gives, for those to whom a request is one text and time counts."""
        if not text or text.isspace():
            raise InvalidPrompt("the text is empty; give at least a word")
        limit, side = self._limit(params, PLAIN)
        (ids,) = self._encode(self._case([prefix + text]), limit, side)
        if not 0 < len(ids) <= self.max_model_len:
            self._refuse_length(len(ids))
        if max(ids) >= self.vocab_size:
            raise InvalidPrompt(f"token id {max(ids)} is unknown; {self.model_name} has 0 to {self.vocab_size - 1}")
        return ids

    def prefix(self, prompt_name: str | None, prompt: str | None = None) -> str:
        """What stands before a text: given itself, by its name, or the model's own."""
        if prompt is not None:
            if prompt_name is not None:
                raise InvalidParams("prompt and prompt_name are both given; leave one out")
            if not isinstance(prompt, str):
                raise InvalidParams(f"prompt is {prompt!r}; give the text to put before each, or a prompt_name")
            return prompt
        name = self.pooling.default_prompt_name if prompt_name is None else prompt_name
        if name is None or (name in ("query", "document") and self.pooling.late and name not in self.pooling.prompts):
            return ""
        if name not in self.pooling.prompts:
            known = ", ".join(self.pooling.prompts) or "none"
            raise InvalidParams(f"{self.model_name} has no prompt {name!r}; it has {known}")
        return self.pooling.prompts[name]

    def role(self, prompt_name: str | None) -> Role:
        """What a text is to late interaction, by the name of its prompt."""
        if not self.pooling.late or prompt_name not in ("query", "document"):
            return PLAIN
        return self.pooling.query if prompt_name == "query" else self.pooling.document

    def pair(self, query: str, document: str, instruction: str | None) -> PoolPrompt:
        """Two texts as one prompt, in the way the model was trained."""
        for text in (query, document):
            if not isinstance(text, str):
                raise InvalidPrompt(f"score compares texts; {type(text).__name__} is none")
            if not text.strip():
                raise InvalidPrompt("one text of a pair is empty; give at least a word")
        template = self.pooling.pair_template
        if template is None:
            if instruction is not None:
                raise InvalidParams(f"{self.model_name} takes no instruction; leave it out")
            return query, document
        said = self.pooling.instruction if instruction is None else instruction
        # once through, so that braces in a text mean nothing
        parts = {"{instruction}": said, "{query}": query, "{document}": document}
        text, rest = "", template
        while rest:
            places = [(rest.find(name), name) for name in parts if name in rest]
            place, name = min(places, default=(len(rest), ""))
            text += rest[:place] + (parts[name] if name else "")
            rest = rest[place + len(name) :]
        return text

    @property
    def _can(self) -> tuple[str, ...]:
        return (*self.pooling.tasks, "generate") if self.pooling.generates else self.pooling.tasks

    def _check_dimensions(self, dimensions: int, task: Task) -> None:
        if task not in ("embed", "token_embed"):
            raise InvalidParams(f"dimensions is {dimensions} and the task {task}, which makes no vectors; leave it out")
        size = self.pooling.embed_size if task == "embed" else self.pooling.token_size
        sizes = self.pooling.matryoshka
        if dimensions > size:
            raise InvalidParams(f"dimensions is {dimensions}; vectors of {self.model_name} have {size}")
        if sizes is None:
            raise InvalidParams(f"vectors of {self.model_name} were not made to be cut; leave dimensions out")
        if sizes != "any" and dimensions not in (*sizes, size):
            raise InvalidParams(
                f"dimensions is {dimensions}; vectors of {self.model_name} were made to be cut to "
                f"{', '.join(map(str, sizes))}"
            )

    def _chunk(
        self,
        prompts: Sequence[PoolPrompt],
        params: Sequence[PoolingParams],
        start: int,
        total: int,
        prefix: str,
        role: Role,
    ) -> list[Prepared]:
        prepared: list[Prepared | None] = [None] * len(prompts)
        texts: dict[_Cut, list[int]] = {}  # places of texts by how they are cut
        pairs: dict[_Cut, list[int]] = {}
        shown: list[str | None] = [None] * len(prompts)
        place = 0
        try:
            for place, prompt in enumerate(prompts):
                kind = type(prompt)
                if kind is list or kind is array or kind is np.ndarray:
                    ids = self._kept(_ids(prompt), params[place])
                    prepared[place] = Prepared(start + place, None, ids, None, params[place])
                elif kind is tuple and len(cast(tuple[Any, ...], prompt)) == 2 and _has_text(prompt):
                    _check_pair(*cast(tuple[Any, Any], prompt))
                    pairs.setdefault(self._limit(params[place], PLAIN), []).append(place)
                elif isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
                    whole = _ids(prompt["prompt_token_ids"])
                    ids = self._kept(whole, params[place])
                    begin = self._type_start(prompt.get("token_type_ids"), len(whole))
                    begin = None if begin is not None and begin >= len(ids) else begin
                    prepared[place] = Prepared(start + place, prompt.get("prompt"), ids, begin, params[place])
                elif isinstance(text := prompt.get("prompt") if isinstance(prompt, Mapping) else prompt, str):
                    if not text.strip():
                        raise InvalidPrompt("the text is empty; give at least a word")
                    shown[place] = text
                    texts.setdefault(self._limit(params[place], role), []).append(place)
                elif isinstance(prompt, Sequence):
                    ids = self._kept(_ids(prompt), params[place])
                    prepared[place] = Prepared(start + place, None, ids, None, params[place])
                else:
                    raise InvalidPrompt(
                        f"a prompt is a text, a list of token ids, a pair of texts or an object with prompt or "
                        f"prompt_token_ids; this is {type(prompt).__name__}"
                    )
            for (limit, side), places in texts.items():
                given = [prefix + cast(str, shown[place]) for place in places]
                for place, found in zip(places, self._encode(self._case(given), limit, side), strict=True):
                    ids, seen = self._as(role, found) if role is not PLAIN else (array("i", found), None)
                    prepared[place] = Prepared(start + place, shown[place], ids, None, params[place], seen)
            for (limit, side), places in pairs.items():
                two = [cast(tuple[str, str], prompts[place]) for place in places]
                for place, (found, begin) in zip(places, self._encoder().pairs(two, limit, side=side), strict=True):
                    begin = begin if self.pooling.has_types else None
                    prepared[place] = Prepared(start + place, None, array("i", found), begin, params[place])
            done = cast(list[Prepared], prepared)
            lengths = [len(one.ids) for one in done]
            if min(lengths) < 1 or max(lengths) > self.max_model_len:
                place = next(i for i, length in enumerate(lengths) if not 0 < length <= self.max_model_len)
                self._refuse_length(lengths[place])
            place = -1
            self._check_range(done)
        except UserError as error:
            if total == 1 or place < 0:
                raise
            raise type(error)(f"prompt {start + place + 1} of {total}: {error}") from None
        return done

    def _kept(self, ids: array[int], params: PoolingParams) -> array[int]:
        keep = params.truncate_prompt_tokens
        if keep is None or params.truncation_side == "never":
            return ids
        keep = keep if keep > 0 else self.max_model_len
        return ids[-keep:] if params.truncation_side == "left" else ids[:keep]

    def _limit(self, params: PoolingParams, role: Role) -> _Cut:
        """Tokens to which a text is cut: as asked, else as its role or the folder says, else not at all."""
        side = params.truncation_side
        if side == "never":
            return None, side
        keep = params.truncate_prompt_tokens
        if keep is None:
            keep = self.pooling.max_seq_length if role.length is None else role.length
            if keep is None:
                return None, side
        keep = self.max_model_len if keep < 0 else min(keep, self.max_model_len)
        return (keep if role.token_id is None else max(keep - 1, 1)), side

    def _as(self, role: Role, found: list[int]) -> tuple[array[int], int | None]:
        """A text's ids as late interaction reads them, and how many of them are seen; None: all."""
        ids = array("i", found)
        if role.token_id is not None:
            ids.insert(1, role.token_id)
        missing = min(role.filled, self.max_model_len) - len(ids)
        if role.filler_id is None or missing <= 0:
            return ids, None
        num_seen = None if role.filler_is_seen else len(ids)
        ids.extend([role.filler_id] * missing)
        return ids, num_seen

    def _type_start(self, types: Any, count: int) -> int | None:
        if types is None:
            return None
        found = types.tolist() if isinstance(types, np.ndarray) else types
        found = list(found) if isinstance(found, Sequence) else []
        num_zeros = found.count(0)
        if len(found) != count or found != [0] * num_zeros + [1] * (count - num_zeros):
            raise InvalidPrompt(
                f"token_type_ids must be {count} numbers, zeros first and then ones; leave them out or correct them"
            )
        if num_zeros == count:
            return None
        if not self.pooling.has_types:
            raise InvalidPrompt(
                f"token_type_ids holds ones, and {self.model_name} tells no two texts apart; leave them out"
            )
        return num_zeros

    def _case(self, texts: list[str]) -> list[str]:
        return [text.lower() for text in texts] if self.pooling.lower_case else texts

    def _encode(self, texts: list[str], limit: int | None, side: str) -> list[list[int]]:
        found = self._encoder().texts(texts, limit, side=side)
        if side == "never" and (most := self.pooling.max_seq_length) is not None:
            for ids in found:
                if len(ids) > most:
                    raise PromptTooLong(
                        f"the prompt has {len(ids)} tokens, {self.model_name} reads {most} of a text; shorten it or "
                        "let it be cut"
                    )
        return found

    def _encoder(self) -> Pieces:
        if self._pieces is None:
            if self.tokenizer is None:
                raise BadTokenizer("the prompt is text and skip_tokenizer_init is set; give token ids or unset it")
            self._pieces = Pieces(self.tokenizer)
        return self._pieces

    def _refuse_length(self, length: int) -> None:
        if not length:
            raise InvalidPrompt("the prompt has no tokens; give at least one")
        way_out = "shorten it or set truncate_prompt_tokens" + (", or raise max_model_len" if self.can_grow else "")
        raise PromptTooLong(f"the prompt has {length} tokens, {self.model_name} takes {self.max_model_len}; {way_out}")

    def _check_range(self, prepared: list[Prepared]) -> None:
        """All ids at once: looking into each prompt would cost more than reading it did."""
        ids = np.frombuffer(b"".join([one.ids for one in prepared]), np.int32)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            for one in prepared:
                for token in one.ids:
                    if not 0 <= token < self.vocab_size:
                        raise InvalidPrompt(
                            f"token id {token} is unknown; {self.model_name} has 0 to {self.vocab_size - 1}"
                        )


def _one_ahead(make: Callable[[slice], list[Prepared]], parts: list[slice]) -> Iterator[Prepared]:
    """A thread encodes the next texts while those before are under way: the library that does it lets others run."""
    with ThreadPoolExecutor(1, "slipstream-texts") as thread:
        coming = thread.submit(make, parts[0])
        for part in parts[1:]:
            done, coming = coming, thread.submit(make, part)
            yield from done.result()
        yield from coming.result()


def _length(one: Prepared) -> int:
    return len(one.ids)


def _ids(given: Any) -> array[int]:
    try:
        return array("i", given.tolist() if isinstance(given, np.ndarray) else given)
    except OverflowError:
        raise InvalidPrompt("prompt_token_ids holds a number that no model has a token for; give token ids") from None
    except (TypeError, ValueError):
        raise InvalidPrompt(
            f"prompt_token_ids is {type(given).__name__} and not a list of whole numbers; give token ids"
        ) from None


def _has_text(pair: Any) -> bool:
    return isinstance(pair[0], str) or isinstance(pair[1], str)


def _check_pair(first: Any, second: Any) -> None:
    for one in (first, second):
        if not isinstance(one, str):
            raise InvalidPrompt(f"a pair is two texts, and one of these is {type(one).__name__}; give texts")
