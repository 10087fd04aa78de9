"""Small tokenizers of the kinds that chat models use, made by the tests, all with ChatML's control tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from slipstream.text.gguf_vocab import gguf_tokenizer
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import SPECIAL_TOKENS, byte_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:45 on the 3rd of May; don't worry!",
    "def f(x):\n    return x ** 2  # squared\n\n\nprint(f(3), [a for a in range(10)], {'k': 'v'})",
    "naïve café – “quotes” … € 日本語のテキスト Привет, мир 🙂",
    "user assistant system im_start im_end start end of text role <b>bold</b> | table | a_b/c-d",
] * 3
EVERY_BYTE = [f"<0x{byte:02X}>" for byte in range(256)]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _special(backend: Backend, **flags: bool) -> Backend:
    flags = {"normalized": False} | flags
    backend.add_special_tokens([AddedToken(text, special=True, **flags) for text in SPECIAL_TOKENS])
    return backend


def _byte_level(regex: str | None = None) -> Backend:
    backend = Backend(models.BPE())
    if regex is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(regex), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


def _pieces(add_space: Callable[[Backend], None]) -> Backend:
    """Like Llama's: spaces are marked, and bytes encode text that no piece covers, such as all characters beyond
    ASCII."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    plain = [text.encode("ascii", "ignore").decode() for text in CORPUS]
    trained.train_from_iterator(plain, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    own: dict[str, Any] = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *EVERY_BYTE, *own["vocab"]]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in own["merges"]]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    add_space(backend)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def _legacy_space(backend: Backend) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)


def _first_space(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)


def _unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", *SPECIAL_TOKENS]
    backend.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    return backend


def _gguf_pieces() -> Backend:
    words = ["▁the", "▁a", "he", "th", "▁t", "▁", "t", "h", "e", "a", "is", "i", "s", "▁is"]
    words += ["user", "us", "er", "u", "r", "\n"]
    tokens = ["<unk>", "<s>", "</s>", *EVERY_BYTE, *words, *SPECIAL_TOKENS]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words), *[3] * len(SPECIAL_TOKENS)]
    fields = {
        "model": "llama", "tokens": tokens, "token_type": kinds, "scores": [-float(i) for i in range(len(tokens))],
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True,
    }  # fmt: skip
    return gguf_tokenizer({f"tokenizer.ggml.{name}": value for name, value in fields.items()})


_KINDS: dict[str, Callable[[], Backend]] = {
    "bytes": byte_tokenizer,
    "byte-level": lambda: _special(_byte_level()),
    "byte-level, regex": lambda: _special(_byte_level(SPLIT)),
    "byte-level, strips right": lambda: _special(_byte_level(SPLIT), rstrip=True),
    "pieces, space before each part": lambda: _special(_pieces(_legacy_space)),
    "pieces, space before the first": lambda: _special(_pieces(_first_space)),
    "unigram": lambda: _special(_unigram(), normalized=True),
    "gguf pieces": _gguf_pieces,
}
KINDS = tuple(_KINDS)


MORE_SPECIAL = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "[INST]", "[/INST]")
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<｜Next｜>", "<table>", "\n\n", "    ")


@lru_cache
def _made(kind: str) -> str:
    """Trained once per process, since training is not deterministic."""
    return _KINDS[kind]().to_str()


def make_tokenizer(kind: str, *, more: bool = False, **templates: str) -> Tokenizer:
    """`more`: with further control tokens, and added tokens that are ordinary text."""
    backend = Backend.from_str(_made(kind))
    if more:
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MORE_SPECIAL])
        backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL])
    names = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    return Tokenizer(backend, names, templates)
