"""Builds a `tokenizers.Tokenizer` from the vocabulary and merges of a GGUF file.

Four kinds are supported: "gpt2", byte-level BPE with merges; "llama", SentencePiece pieces with scores and byte
fallback; "bert", WordPiece; and "t5", Unigram. `tokenizer.ggml.pre` names the pre-tokenizer of "gpt2"; an unknown name
is an error, because a wrong split would silently give wrong tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.errors import BadTokenizer
from slipstream.text.gguf_splits import SPLIT_RULES

_HINT = "pass tokenizer=... with the folder or tokenizer.json of the same model, or skip_tokenizer_init=True"

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6


def gguf_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Builds a tokenizer from the fields `tokenizer.ggml.*`. It recognises special tokens in a text."""
    kind = fields.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece, "bert": _word_piece, "t5": _unigram}
    build = builders.get(str(kind))
    if build is None:
        raise BadTokenizer(
            f"the GGUF's vocabulary is of kind {kind!r}; supported are {', '.join(map(repr, builders))}; {_HINT}"
        )
    tokens = _list(fields, "tokens", str)
    types = _list(fields, "token_type", int) if "tokenizer.ggml.token_type" in fields else [1] * len(tokens)
    if len(types) != len(tokens):
        raise _broken(f"{len(tokens)} tokens have {len(types)} types")
    try:
        tokenizer = build(fields, tokens, types)
    except BadTokenizer:
        raise
    except Exception as error:  # the library raises plain Exceptions, for example for a merge of an unknown token
        raise _broken(str(error)) from None
    _add_marked_tokens(tokenizer, tokens, types)
    if kind != "bert":  # which adds its own
        _add_ends(tokenizer, fields)
    return tokenizer


def special_token(fields: Mapping[str, Any], name: str) -> tuple[str, int] | None:
    """Returns the text and id of a special token of the file: bos, eos and so on."""
    number = fields.get(f"tokenizer.ggml.{name}_token_id")
    tokens = fields.get("tokenizer.ggml.tokens") or []
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(tokens):
        return None
    return tokens[number], number


def _byte_level(fields: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    name = str(fields.get("tokenizer.ggml.pre", "default"))
    rule = SPLIT_RULES.get(name)
    if rule is None:
        raise BadTokenizer(f"the GGUF splits text by {name!r}; known are {', '.join(sorted(SPLIT_RULES))}; {_HINT}")
    merges = _list(fields, "merges", str)
    tokenizer = Tokenizer(models.BPE(vocab=_numbered(tokens), merges=_pairs(merges), ignore_merges=rule.ignores_merges))
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(fields: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """Merges neighbours into the piece with the best score; characters without a piece become bytes."""
    scores, vocab = _scores(fields, tokens), _numbered(tokens)
    normal = [
        i for i, kind in enumerate(types) if kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED) and len(tokens[i]) > 1
    ]
    merges: list[tuple[str, str]] = []
    for i in sorted(normal, key=lambda i: -scores[i]):  # stable: equal scores merge by ascending id
        token = tokens[i]
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges.extend((left, right) for left, right in halves if left in vocab and right in vocab)
    unknown = _unknown_token(fields, tokens, types)
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token=unknown[0] if unknown else None, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    add_space = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    spaces_to_marks = normalizers.Replace(" ", "▁")
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces_to_marks])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces_to_marks
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _unigram(fields: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """The pieces with the best sum of scores (XLM-RoBERTa, T5). Rows of the embedding behind the last piece have
    invented names in a file, and scores so low that they would change that of unknown characters: they are left out."""
    scores, unknown = _scores(fields, tokens), _unknown_token(fields, tokens, types)
    _numbered(tokens)
    if unknown is None:
        raise _broken("there is no unknown token")
    count = next((i + 1 for i in reversed(range(len(types))) if types[i] != _UNUSED), 0)
    pieces = list(zip(tokens[:count], scores, strict=False))
    tokenizer = Tokenizer(models.Unigram(pieces, unknown[1], byte_fallback=_BYTE in types))
    steps: list[normalizers.Normalizer] = []
    if charsmap := fields.get("tokenizer.ggml.precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(value % 256 for value in charsmap)))  # some files have signed bytes
    if fields.get("tokenizer.ggml.remove_extra_whitespaces", True):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if fields.get("tokenizer.ggml.add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def _word_piece(fields: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """A GGUF marks the pieces that begin a word, BERT those that do not. The file has no field for case: a vocabulary
    without capital letters is for texts in lower case, without accents."""
    words = [
        token if kind in (_UNKNOWN, _CONTROL) or (token[:1] == "[" and token[-1:] == "]")
        else token[1:] if token.startswith("▁")
        else f"##{token}"
        for token, kind in zip(tokens, types, strict=True)
    ]  # fmt: skip
    vocab = _numbered(words)
    ends = {}
    for mark, names in {"[CLS]": ("cls", "bos"), "[SEP]": ("seperator", "eos"), "[UNK]": ("unknown",)}.items():
        named = next((found for name in names if (found := special_token(fields, name)) is not None), None)
        text = mark if named is None else words[named[1]]
        if text not in vocab:
            raise _broken(f"there is no token {mark}")
        ends[mark] = text
    first, last, unknown = ends.values()
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token=unknown))
    lower = not any("A" <= letter <= "Z" for word in words if word[:1] != "[" for letter in word)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(first, vocab[first]), (last, vocab[last])],
    )
    return tokenizer


def _add_marked_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Adds control tokens as special tokens, and user-defined ones as ordinary added tokens."""
    special = [tokens[i] for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)]
    plain = [tokens[i] for i, kind in enumerate(types) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special if text])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain if text])


def _add_ends(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    """Adds the bos and eos tokens around a text if the file enables them."""
    # the default of files without the field: SentencePiece models and some byte-level BPE models add bos, Unigram eos
    kind, rule = fields.get("tokenizer.ggml.model"), SPLIT_RULES.get(str(fields.get("tokenizer.ggml.pre")))
    usual = kind == "llama" or (rule is not None and rule.adds_bos)
    begins = fields.get("tokenizer.ggml.add_bos_token", usual)
    bos = special_token(fields, "bos") if begins else None
    eos = special_token(fields, "eos") if fields.get("tokenizer.ggml.add_eos_token", kind == "t5") else None
    if bos is None and eos is None:
        return
    template = [*([bos[0]] if bos else []), "$A", *([eos[0]] if eos else [])]
    named = [pair for pair in (bos, eos) if pair is not None]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)


def _unknown_token(fields: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[str, int] | None:
    of_type = ((tokens[i], i) for i, kind in enumerate(types) if kind == _UNKNOWN)
    return special_token(fields, "unknown") or next(of_type, None)


def _scores(fields: Mapping[str, Any], tokens: list[str]) -> list[float]:
    scores = _list(fields, "scores", float)
    if len(scores) != len(tokens):
        raise _broken(f"{len(tokens)} tokens have {len(scores)} scores")
    return scores


def _numbered(tokens: list[str]) -> dict[str, int]:
    vocab = {text: i for i, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(text for i, text in enumerate(tokens) if vocab[text] != i)
        raise _broken(f"the token {twice!r} is listed twice")
    return vocab


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    parts = map(str.partition, merges, repeat(" "))
    pairs = [(left, right) for left, _, right in parts if left and right]
    if len(pairs) != len(merges):
        bad = next(merge for merge in merges if not all(merge.partition(" ")))
        raise _broken(f"the merge {bad!r} is not two tokens")
    return pairs


def _list(fields: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    values = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):
        raise _broken(f"field tokenizer.ggml.{name} is missing or of the wrong kind")
    return values


def _broken(what: str) -> BadTokenizer:
    return BadTokenizer(f"the GGUF's vocabulary is broken: {what}; {_HINT}")
