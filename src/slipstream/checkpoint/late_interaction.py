"""Settings of late interaction: how queries and documents are prepared for models that compare token vectors.

ColBERT's own checkpoints have them in artifact.metadata, PyLate and sentence-transformers folders in JSON files. What
is missing there has the values of the original ColBERT.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.base.files import read_file, read_utf8
from slipstream.checkpoint.pooling_info import Role
from slipstream.checkpoint.sentence_modules import SentenceFolder

USUAL_QUERY = 32  # tokens to which queries are padded if the checkpoint does not say
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_PYLATE = (  # if one of these is set, queries are padded unless the settings say otherwise
    "query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens",
    "query_prefix", "document_prefix", "skiplist_words",
)  # fmt: skip


def late_interaction_info(path: Path, folder: SentenceFolder, *, is_causal: bool, reach: int | None) -> dict[str, Any]:
    """Fields of PoolingInfo. `reach`: tokens to each side that some layer attends to; None: all layers see
    everything."""
    found = _of_folder(path, folder) if folder.has_modules else _of_colbert(path)
    query: Role = found["query"]
    if not query.filler_is_seen and (is_causal or (reach is not None and reach < query.filled - 1)):
        sees = "earlier tokens only" if is_causal else f"{reach} tokens to each side"
        raise UnsupportedModel(
            f"{path.name} pads queries to {query.filled} tokens with mask tokens that no token attends to, and some "
            f"layer attends to {sees}; this needs a model whose every layer attends to the whole query"
        )
    return found


def _of_colbert(path: Path) -> dict[str, Any]:
    meta = path / "artifact.metadata"
    settings: dict[str, Any] = {}
    if meta.is_file():
        try:
            settings = msgspec.json.decode(read_file(meta), type=dict[str, Any])
        except (OSError, RecursionError, msgspec.DecodeError) as error:
            raise BadCheckpoint(f"{meta} cannot be read: {error}; download the model again") from None
    words = read_vocabulary(path)
    length = _size(settings, "query_maxlen", meta) or USUAL_QUERY
    filler = _filler(path, words, None)
    found: dict[str, Any] = {
        "query": Role(
            token_id=_word(words, settings.get("query_token_id") or "[unused0]", meta),
            length=length,
            filler_id=filler,
            filled=length,
            filler_is_seen=bool(settings.get("attend_to_mask_tokens")),
        ),
        "document": Role(
            token_id=_word(words, settings.get("doc_token_id") or "[unused1]", meta),
            length=_size(settings, "doc_maxlen", meta),
        ),
    }
    if settings.get("mask_punctuation", True):
        found["skip_token_ids"] = _known(words, _PUNCTUATION)
    if size := _size(settings, "dim", meta):
        found["token_size"] = size
    return found


def _of_folder(path: Path, folder: SentenceFolder) -> dict[str, Any]:
    file = path / "config_sentence_transformers.json"
    settings = folder.late_interaction_settings | folder.module_settings
    words = read_vocabulary(path)
    markers, prompts = _markers(folder, words)
    query = Role(token_id=markers.get("query"), length=_size(settings, "query_length", file))
    document = Role(token_id=markers.get("document"), length=_size(settings, "document_length", file))
    if (expansion := _expansion(path, folder, settings)) is not None:
        filled = _size(expansion, "length", file)
        if filled is None:
            raise BadCheckpoint(f"{path.name}: its query_expansion has no length; download it again")
        longest = None if query.length is None else max(query.length, filled)
        query = Role(
            token_id=query.token_id,
            length=filled if expansion["strategy"] == "fixed" else longest,
            filler_id=_filler(path, words, expansion.get("token")),
            filled=filled,
            filler_is_seen=bool(expansion.get("attend")),
        )
    if settings.get("keep_only_token_ids"):
        raise UnsupportedModel(
            f"{path.name} compares only some kinds of a document's tokens (keep_only_token_ids), as models of images "
            "do; models of texts run here"
        )
    skipped = settings.get("skiplist_words")
    if skipped is None and settings.get("model_type") == "ColBERT":  # PyLate's default
        skipped = list(_PUNCTUATION)
    tasks = settings.get("skiplist_tasks") or ["document"]
    if skipped and tasks not in (["document"], "document"):
        raise UnsupportedModel(f"{path.name} leaves words of {tasks} out; of documents alone is what runs here")
    return {
        "query": query, "document": document, "prompts": prompts, "skip_token_ids": _known(words, skipped or ()),
    }  # fmt: skip


def _expansion(path: Path, folder: SentenceFolder, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The padding of queries; None: no padding. PyLate's own folders pad unless they say otherwise."""
    found: Any = settings.get("query_expansion")
    by_pylate = "query_expansion" not in settings and any(key in folder.late_interaction_settings for key in _PYLATE)
    if by_pylate and settings.get("do_query_expansion") is not False:
        attend = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
        found = {"strategy": "fixed", "attend": attend, "length": settings.get("query_length") or USUAL_QUERY}
    if found is not None and (not isinstance(found, dict) or found.get("strategy") not in ("fixed", "min")):
        raise UnsupportedModel(f"{path.name} expands queries by {found!r}; the strategies fixed and min run here")
    return found


def _markers(folder: SentenceFolder, words: dict[str, int]) -> tuple[dict[str, int], dict[str, str]]:
    """For each role the token that PyLate inserts, and the remaining prompts. As text it might be split into several
    tokens."""
    markers: dict[str, int] = {}
    prompts = dict(folder.prompts)
    for role in ("query", "document"):
        prefix = folder.late_interaction_settings.get(f"{role}_prefix")
        if not isinstance(prefix, str) or not prefix.strip():
            continue
        token = next((words[word] for word in (prefix, prefix.split()[0]) if word in words), None)
        if token is not None:
            markers[role] = token
            prompts[role] = prompts[role].removeprefix(prefix)
            if not prompts[role]:
                del prompts[role]
    return markers, prompts


def _filler(path: Path, words: dict[str, int], named: object) -> int:
    """The mask token, or the end token if there is none."""
    file = path / "tokenizer_config.json"
    names = [named]
    if named is None:
        try:
            special = msgspec.json.decode(read_file(file), type=dict[str, Any]) if file.is_file() else {}
        except (OSError, RecursionError, msgspec.DecodeError) as error:
            raise BadCheckpoint(f"{file} cannot be read: {error}; download it again") from None
        own = [special.get(kind) for kind in ("mask_token", "eos_token")]
        names = [name.get("content") if isinstance(name, dict) else name for name in own]
        names[1:1] = ["[MASK]", "<mask>"]
    for name in names:
        if isinstance(name, str) and name in words:
            return words[name]
    raise BadCheckpoint(
        f"{path.name} fills queries up with {'a mask token' if named is None else repr(named)}, which its tokenizer "
        "does not have; download it again"
    )


def _word(words: dict[str, int], word: object, file: Path) -> int:
    if not isinstance(word, str) or word not in words:
        raise BadCheckpoint(f"{file} marks texts with {word!r}, which the tokenizer does not have; download it again")
    return words[word]


def _known(words: dict[str, int], wanted: Any) -> tuple[int, ...]:
    """The words that are single tokens."""
    return tuple(sorted({words[word] for word in wanted if word in words}))


def _size(settings: dict[str, Any], key: str, file: Path) -> int | None:
    value = settings.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise BadCheckpoint(f"{file}: {key} is {value!r}, not a number from 1 up; download it again")
    return value


# A folder's words and their token ids, for settings that name words. No tokenizer is built.


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}  # by word; or a list of words in order, each with a weight


class _Added(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def read_vocabulary_lines(path: Path) -> dict[str, int]:
    """From a vocab.txt: one word per line, whose id is the line number."""
    try:
        lines = read_utf8(path).split("\n")
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download it again") from None
    if lines and not lines[-1]:  # after the last line break
        del lines[-1]
    return {line.rstrip(): number for number, line in enumerate(lines)}


def read_vocabulary(folder: Path) -> dict[str, int]:
    if not (folder / "tokenizer.json").is_file() and (folder / "vocab.txt").is_file():
        return read_vocabulary_lines(folder / "vocab.txt")
    try:
        found = msgspec.json.decode(read_file(folder / "tokenizer.json"), type=_Tokenizer)
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{folder} has no tokenizer.json, in which its special words are looked up; add it"
        ) from None
    except (OSError, RecursionError, msgspec.DecodeError) as error:
        raise BadCheckpoint(f"{folder}/tokenizer.json cannot be read: {error}; download it again") from None
    words = found.model.vocab
    if isinstance(words, list):
        words = {str(entry[0]): index for index, entry in enumerate(words) if isinstance(entry, list) and entry}
    return words | {added.content: added.id for added in found.added_tokens}
