"""Tokenizers of the survey's models: byte-level BPE of English text, and tables of the token ids that tests expect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SIZE = 1280  # BPE tokens; special tokens follow
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|endoftext|>", "<extra_0>")
BOS, EOS = SIZE, SIZE + 1
IM_END = SIZE + 3
UNK, PAD = 1200, 1201  # of tables
MERGED_PAD = 1999  # of `write_merged`
VOCAB_SIZE = 1344  # of the models: larger than the tokenizer's, as in real checkpoints

CHATML = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)


def train(text: str) -> Tokenizer:
    """A BPE tokenizer of SIZE tokens, the 256 bytes among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    assert tokenizer.get_vocab_size() == SIZE
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def write_text(
    folder: Path, trained: str, *, bos: bool = False, eos: bool = False, words: Sequence[str] = (), **settings: Any
) -> None:
    """`trained`: of `train`, as JSON. `bos`, `eos`: whether every text gets them. `words`: further tokens."""
    tokenizer = Tokenizer.from_str(trained)
    tokenizer.add_tokens(list(words))
    if bos or eos:
        single = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} {single.replace('$A', '$B')}", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    config = {
        "bos_token": "<s>" if bos else None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }  # fmt: skip
    _write(folder, tokenizer, config | settings)


def write_pair(folder: Path, trained: str, types: bool = True, **settings: Any) -> None:
    """For encoders: <s> before and </s> after each text."""
    tokenizer = Tokenizer.from_str(trained)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    config: dict[str, Any] = {
        "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<|endoftext|>", "mask_token": "<extra_0>"
    }  # fmt: skip
    if types:
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    _write(folder, tokenizer, config | settings)


def write_table(folder: Path, pieces: dict[str, int], around: tuple[str, ...] = (), **settings: Any) -> None:
    """A tokenizer with these ids; other words have UNK. `around`: a first and a last token."""
    vocab = {"<unk>": UNK, "<pad>": PAD} | pieces
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    choices = "|".join(piece.replace(".", r"\.") for piece in sorted(pieces, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{choices}|\s+|\w+|[^\w\s]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    config: dict[str, Any] = {"unk_token": "<unk>", "pad_token": "<pad>"}
    if around:
        first, last = around
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}", pair=f"{first} $A {last} $B {last}",
            special_tokens=[(first, vocab[first]), (last, vocab[last])],
        )  # fmt: skip
        config |= {"cls_token": first, "sep_token": last}
    _write(folder, tokenizer, config | settings)


def write_merged(folder: Path, words: dict[str, int], trained: str, **settings: Any) -> None:
    """A byte-level BPE tokenizer with these ids of words: the library makes one of any file for Qwen2 models. Merges of
    `trained` follow, so that other texts are not long."""
    marks = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda mark: (ord(mark) > 255, ord(mark)))
    vocab = {mark: index for index, mark in enumerate(marks)}
    merges, free = [], 1000
    for word, index in words.items():
        letters = word.replace(" ", "\u0120")  # the space of byte-level tokenizers
        for size in range(2, len(letters) + 1):
            if letters[:size] not in vocab:
                merges.append((letters[: size - 1], letters[size - 1]))
                vocab[letters[:size]] = index if size == len(letters) else free
                free += 1
        assert vocab[letters] == index, word
    vocab["<|endoftext|>"], free = MERGED_PAD, MERGED_PAD + 1
    for left, right in json.loads(trained)["model"]["merges"]:
        if left in vocab and right in vocab and left + right not in vocab:
            merges.append((left, right))
            vocab[left + right] = free
            free += 1
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # digit by digit, as the library's tokenizer of Qwen2
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    assert tokenizer.token_to_id("<|endoftext|>") == MERGED_PAD and free < 9000
    _write(folder, tokenizer, {"pad_token": "<|endoftext|>"} | settings)


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    common = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(common | config, indent=2))
