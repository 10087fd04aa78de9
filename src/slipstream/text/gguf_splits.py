"""Pre-tokenizers of byte-level BPE vocabularies in GGUF files, by the name in `tokenizer.ggml.pre`.

Each follows the model's own tokenizer.json. llama.cpp uses simpler expressions for some; where the two differ (mostly
marks and letters outside Latin), this follows tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tokenizers import Regex, pre_tokenizers

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
