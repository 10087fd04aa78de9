"""Builds a `tokenizers.Tokenizer` from the vocabulary and merges of a GGUF file.

Four kinds are supported: "gpt2", byte-level BPE with merges; "llama", SentencePiece pieces with scores and byte
fallback; "bert", WordPiece; and "t5", Unigram. `tokenizer.ggml.pre` names the pre-tokenizer of "gpt2"; an unknown name
is an error, because a wrong split would silently give wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.base.errors import BadTokenizer

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


# Pre-tokenizers of byte-level BPE vocabularies in GGUF files, by the name in `tokenizer.ggml.pre`.
#
# Each follows the model's own tokenizer.json. llama.cpp uses simpler expressions for some; where the two differ (mostly
# marks and letters outside Latin), this follows tokenizer.json.

Step = str | Callable[[], pre_tokenizers.PreTokenizer]
"""A regular expression whose matches become separate pieces, or a pre-tokenizer of the library."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    steps: tuple[Step, ...]
    ignores_merges: bool = False  # a piece that is a token is not merged from its parts
    composes: bool = False  # text is normalised to NFC first
    adds_bos: bool = False  # unless the file has add_bos_token

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps = [_isolate(step) if isinstance(step, str) else step() for step in self.steps]
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _isolate(pattern: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior=behavior)


def _bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    """With the expression of GPT-2."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Digits(individual_digits=True)


def _by(*patterns: Step) -> SplitRule:
    return SplitRule((*patterns, _bytes))


def _chars(ranges: str) -> str:
    """The inside of a character class, from code points in hexadecimal."""
    return "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in ranges.split())


_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # of English words
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cl100k(digits: str, letters: str = r"\p{L}", not_symbols: str = r"\s\p{L}\p{N}") -> str:
    """GPT-4's expression, which splits digits in threes; Qwen splits them one by one."""
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^{not_symbols}]+[\r\n]*{_SPACES}"


def _o200k(
    digits: str = r"\p{N}{1,3}", endings: str = f"{_ENDINGS}?", tail: str = r"[\r\n/]*", without: str = ""
) -> str:
    """GPT-4o's expression, in which a capital letter begins a word."""
    lead, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    words = f"{lead}{upper}*{lower}+{endings}|{lead}{upper}+{lower}*{endings}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{tail}{_SPACES}"


_LLAMA3, _QWEN2 = _by(_cl100k(r"\p{N}{1,3}")), _by(_cl100k(r"\p{N}"))
_THREES = r"\p{N}{1,3}"
_KANA = f"[{_chars('4e00-9fa5 3040-309f 30a0-30ff')}]+"
_EAST = f"[{_chars('4e00-9fa5 800-4e00 ac00-d7ff')}]+"
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3_WORDS = rf"{_ASCII_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_DEEPSEEK3 = f"{_DEEPSEEK3_WORDS}[\r\n]*{_SPACES}"
_CASED = _chars(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a "
    "1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d "
    "a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_MARKS = _chars("ff01-ff0f ff1a-ff5e 2018-201f 3000-3002")
_BLOOM = rf" ?[^(\s|.,!?{_chars('2026 3002 ff0c 3001 964 6d4 60c')})]+"
_YOUTU = (
    f"[{_chars('ac00-d7a3 3131-318e')}]+"
    f"|[{_chars('ff01 2026 201c 201d 2018 2019 2014 ff1a ff1b ff0c 3001-303f fe30-fe4f')}]+"
    f"|[{_chars('3105-312f')}]+|{_KANA}"
)
_AFMOE = _chars(
    "4e00-9fff 3400-4dbf f900-faff 3040-309f 30a0-30ff ff65-ff9f 2f00-2fdf e40-e7f e80-eff 1780-17ff 1000-109f "
    "aa60-aa7f a9e0-a9ff ac00-d7af 1100-11ff"
)
_FALCON = SplitRule(
    (
        lambda: pre_tokenizers.Punctuation("contiguous"),
        _gpt2,
        lambda: pre_tokenizers.Digits(individual_digits=False),
        "[0-9][0-9][0-9]",
    )
)
_WIDE_SPACES = "".join(rf"|\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1))

_RULES: list[tuple[str, SplitRule]] = [
    ("default gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais exaone4 trillion", SplitRule((_gpt2,))),
    ("roberta-bpe jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-de jina-es", SplitRule((_gpt2,))),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", SplitRule((_digits, _gpt2))),
    ("command-r", SplitRule((_digits, _gpt2), composes=True)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        replace(_LLAMA3, ignores_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe granite-docling", _LLAMA3),
    ("chatglm-bpe glm4", replace(_LLAMA3, ignores_merges=True)),
    ("qwen2 deepseek-r1-qwen stablelm2 f2llmv2", replace(_QWEN2, composes=True)),
    ("megrez hunyuan grok-2 solar-open kormo", _QWEN2),
    ("qwen35", replace(_by(_cl100k(r"\p{N}", r"[\p{L}\p{M}]", r"\s\p{L}\p{M}\p{N}")), composes=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _by(_o200k())),
    ("granite-embed-multi-97m", replace(_by(_o200k()), ignores_merges=True)),
    ("tekken", replace(_by(_o200k(r"\p{N}", "")), ignores_merges=True, adds_bos=True)),
    ("kimi-k2", _by(r"[\p{Han}]+|" + _o200k(tail=r"[\r\n]*", without=r"&&[^\p{Han}]"))),
    ("tiny_aya cohere2moe", _by(r"\d{1,3}(?=(?:\d{3})*\b)", _o200k())),
    ("youtu", replace(_by(_YOUTU, _o200k(r"\p{N}")), ignores_merges=True)),
    ("deepseek-llm", _by("[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[!-/:-~{_MARKS}]+", r"\s+$", _EAST, _digits)),
    ("deepseek-coder", _by("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, _digits)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _by(_THREES, _KANA, _DEEPSEEK3)),
    ("spark2_5", _by(_THREES, _KANA, f"{_DEEPSEEK3_WORDS}|[\r\n]|\\s+(?!\\S)|\\s+", _digits)),
    ("afmoe", _by(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", f"[{_AFMOE}]+", _DEEPSEEK3)),
    ("minicpm5", replace(_by(_THREES, _cl100k(r"\p{N}+")), ignores_merges=True)),
    ("superbpe", _by(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("bloom poro-chat gpt3-finnish", _by(_BLOOM)),
    ("viking", _by(_BLOOM, r"\p{N}")),
    ("falcon", _FALCON),
    (
        "chameleon",
        SplitRule(
            ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
             r"[\p{P}!-/:-@\[-`{-~]", _gpt2),
            adds_bos=True,
        ),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        _by(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
    ),
    ("seed-coder", _by(rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}")),
    ("laguna", _by(lambda: _isolate(r"(?:\r?\n)+(?!\r?\n)", "merged_with_next"), _cl100k(r"\p{N}"))),
    (
        "exaone-moe",
        _by(
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
    ),
    (
        "jais-2",
        _by(
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
            rf"{_WIDE_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}"
        ),
    ),
    ("ufakzeka", _by(rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}")),
]  # fmt: skip
SPLIT_RULES = {name: rule for names, rule in _RULES for name in names.split()}
