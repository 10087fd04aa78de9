"""Tiny models of random weights under the names that vLLM's tests and examples ask for, in a cache of the hub.

SmolLM2-135M-Instruct and all-MiniLM-L6-v2, whose weights are installed with the tests, replace models whose text or
vectors matter.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slipstream.base.errors import ModelNotFound
from tiny import write_tiny
from tiny_adapter import write_adapter
from tiny_drafters import write_eagle3
from tiny_encoder import scatter, write_modules, write_tiny_encoder
from vllm_survey import tokenizers
from vllm_survey.tokenizers import BOS, IM_END, VOCAB_SIZE

log = logging.getLogger(__name__)

COMMIT = "0" * 39 + "1"
Recipe = Callable[[Path, str], None]  # folder, trained tokenizer

E5_IDS = {
    "<s>": 0, "</s>": 2, "The": 581, " che": 21861, "f": 133888, " prepare": 10, "d": 8, " a": 150, " delicious": 60744,
    " meal": 109911, ".": 5,
}  # fmt: skip
QWEN_IDS = {"The": 785, " chef": 29706, " prepared": 10030, " a": 264, " delicious": 17923, " meal": 15145, ".": 13}


def decoder(family: str = "llama", *, bos: bool = False, eos: bool = False, **overrides: Any) -> Recipe:
    def write(folder: Path, trained: str) -> None:
        settings = dict(vocab_size=VOCAB_SIZE, max_position_embeddings=8192, bos_token_id=BOS, eos_token_id=IM_END)
        if family in ("mistral", "gemma2", "gemma3"):
            settings["sliding_window"] = 4096
        if family == "gemma2":  # the library's SDPA leaves the soft cap out: as in real models it changes little
            settings |= dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
        write_tiny(folder, family, **settings | overrides)
        tokenizers.write_text(folder, trained, bos=bos, eos=eos)

    return write


def reranker(folder: Path, trained: str) -> None:
    """A causal LM that answers yes or no."""
    decoder("qwen3")(folder, trained)
    tokenizers.write_text(folder, trained, words=("yes", "no"))


def opt(folder: Path, trained: str) -> None:
    """Tests expect that greedy texts do not end: the end-of-text token has logit 0."""
    _library(folder, "OPT", "ForCausalLM", ffn_dim=96, num_hidden_layers=2, max_position_embeddings=2048,
             word_embed_proj_dim=64, hidden_size=64, num_attention_heads=4, pad_token_id=1)  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    weights["model.decoder.embed_tokens.weight"][IM_END] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizers.write_text(folder, trained, bos=True)


def scorer(family: str, labels: int, ids: dict[str, int] | None = None, task: str = "Sequence", **more: Any) -> Recipe:
    """A decoder with a classification head."""

    def write(folder: Path, trained: str) -> None:
        size = max(VOCAB_SIZE, 1 + max(ids.values())) if ids else VOCAB_SIZE
        pad = tokenizers.SIZE + tokenizers.SPECIAL.index("<|endoftext|>")
        grouped = {} if family == "GPT2" else {"num_key_value_heads": 2}
        _library(folder, family, f"For{task}Classification", vocab_size=size, hidden_size=64, intermediate_size=96,
                 num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=4096, num_labels=labels,
                 pad_token_id=tokenizers.MERGED_PAD if ids else pad, **grouped, **more)  # fmt: skip
        if ids:
            tokenizers.write_merged(folder, ids, trained)
        else:
            tokenizers.write_text(folder, trained, chat_template=None)  # sentence-transformers would render pairs by it

    return write


def encoder(
    family: str = "bert", task: str = "Model", pooling: str | None = None, *, normalize: bool = True, length: int = 512,
    ids: dict[str, int] | None = None, **more: Any,
) -> Recipe:  # fmt: skip
    def write(folder: Path, trained: str) -> None:
        size = max(VOCAB_SIZE, 1 + max(ids.values())) if ids else VOCAB_SIZE
        positions = length + (2 if "roberta" in family else 0)
        settings = dict(vocab_size=size, max_position_embeddings=positions)
        if "roberta" not in family:
            settings["pad_token_id"] = tokenizers.PAD if ids else tokenizers.SIZE + 6
        write_tiny_encoder(folder, family, task, **settings | more)
        has_types = family in ("bert", "nomic")
        if ids:
            mask = {"mask_token": "[MASK]"} if "[MASK]" in ids else {}
            tokenizers.write_table(folder, ids, ("<s>", "</s>"), model_max_length=length, **mask)
        else:
            tokenizers.write_pair(folder, trained, has_types, model_max_length=length)
        if pooling is not None:
            write_modules(folder, pooling, normalize=normalize)
            (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))

    return write


def embedder(family: str, pooling: str = "lasttoken", **more: Any) -> Recipe:
    """A decoder that embeds."""

    def write(folder: Path, trained: str) -> None:
        decoder(family, eos=True, **more)(folder, trained)
        write_modules(folder, pooling)
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 2048}))

    return write


def colbert(folder: Path, trained: str) -> None:
    words = (
        "<s>",
        "</s>",
        "[MASK]",
        "[unused0]",
        "[unused1]",
        "The",
        " chef",
        " prepared",
        " a",
        " delicious",
        " meal",
        ".",
    )
    ids = {word: index for index, word in enumerate(words)}
    encoder("bert", hidden_size=96, num_attention_heads=6, ids=ids)(folder, trained)
    weights = load_file(folder / "model.safetensors")
    weights["linear.weight"] = torch.randn(96, 96, generator=torch.Generator().manual_seed(3)) * 0.2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["HF_ColBERT"]}))


def closing(family: str, favourite: str | None = None) -> Recipe:
    """A decoder that soon ends what a grammar leaves open: tokens that end strings, objects, lists and texts are
    likely, and `favourite` most of all. For tests that need a whole text of a grammar, whatever it says."""

    def write(folder: Path, trained: str) -> None:
        decoder(family, tie_word_embeddings=False)(folder, trained)
        vocab = json.loads(trained)["model"]["vocab"]
        weights = load_file(folder / "model.safetensors")
        for name, weight in weights.items():  # the first value of the hidden state is the same in every layer
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0
        weights["model.embed_tokens.weight"][:, 0] = 400.0
        weights["model.norm.weight"][0] = 1.0
        likely = {IM_END: 1.0, vocab["1"]: 0.5, vocab['"']: 1.4}
        likely |= {index: 1.2 for text, index in vocab.items() if set(text) <= set("}]")}
        likely |= {index: 0.8 for text, index in vocab.items() if set(text) <= set(",@.")}
        if favourite is not None:
            likely[tokenizers.SIZE + tokenizers.SPECIAL.index(favourite)] = 2.0
        weights["lm_head.weight"][:, 0] = 0.0
        weights["lm_head.weight"][list(likely), 0] = torch.tensor(list(likely.values()))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return write


def real_text(folder: Path, trained: str) -> None:
    """SmolLM2-135M-Instruct, from its GGUF file."""
    from slipstream.checkpoint.locate import locate

    file = locate(None).path
    os.symlink(file, folder / file.name)


def real_vectors(folder: Path, trained: str) -> None:
    """all-MiniLM-L6-v2."""
    from slipstream.checkpoint.locate import default_embedder

    shutil.copytree(default_embedder().path, folder, dirs_exist_ok=True)


def adapter(base: str) -> Recipe:
    def write(folder: Path, trained: str) -> None:
        write_adapter(folder, folder.parents[2] / _folder_name(base) / "snapshots" / COMMIT, rank=8)

    return write


def eagle3(base: str) -> Recipe:
    def write(folder: Path, trained: str) -> None:
        write_eagle3(folder, folder.parents[2] / _folder_name(base) / "snapshots" / COMMIT, draft_vocab=None)

    return write


def _library(folder: Path, family: str, task: str, **settings: Any) -> None:
    import transformers

    common = dict(vocab_size=VOCAB_SIZE, bos_token_id=BOS, eos_token_id=IM_END)
    model = getattr(transformers, family + task)(getattr(transformers, f"{family}Config")(**common | settings))
    scatter(model, 0)
    model.save_pretrained(folder)


LLAMA = decoder("llama", bos=True)
MODELS: dict[str, Recipe] = {
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": embedder("qwen2", is_causal=False),
    "BAAI/bge-base-en-v1.5": encoder(pooling="cls"),
    "BAAI/bge-m3": encoder("xlm-roberta", pooling="cls"),
    "BAAI/bge-multilingual-gemma2": embedder("gemma2"),
    "BAAI/bge-reranker-v2-m3": encoder("xlm-roberta", "ForSequenceClassification", num_labels=1),
    "JackFram/llama-160m": decoder("llama", bos=True, max_position_embeddings=2048),
    "Qwen/Qwen2.5-1.5B-Instruct": closing("qwen2"),
    "Qwen/Qwen2.5-3B-Instruct": real_text,
    "Qwen/Qwen2.5-7B-Instruct-1M": decoder("qwen2", max_position_embeddings=32768),
    "Qwen/Qwen3-0.6B": decoder("qwen3", max_position_embeddings=40960),
    "Qwen/Qwen3-1.7B": closing("qwen3", "</think>"),
    "Qwen/Qwen3-4B": decoder("qwen3"),
    "Qwen/Qwen3-8B": decoder("qwen3"),
    "Qwen/Qwen3-Embedding-0.6B": embedder("qwen3"),
    "Qwen/Qwen3-Reranker-0.6B": reranker,
    "Rami/multi-label-class-classification-on-github-issues": encoder(
        "roberta", "ForSequenceClassification", num_labels=4, problem_type="multi_label_classification"
    ),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": scorer("Qwen3", 1, head_dim=16),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": LLAMA,
    "answerdotai/answerai-colbert-small-v1": colbert,
    "bd2lcco/Qwen3-0.6B-finetuned": scorer("Qwen3", 3, task="Token", head_dim=16),
    "boltuix/NeuroBERT-NER": encoder("bert", "ForTokenClassification", num_labels=5),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": decoder("qwen2", bos=True),
    "disham993/electrical-ner-ModernBERT-base": encoder("modernbert", "ForTokenClassification", num_labels=5),
    "distilbert/distilgpt2": decoder("gpt2", max_position_embeddings=1024),
    "facebook/opt-125m": opt,
    "google/gemma-3-1b-it": decoder("gemma3", bos=True),
    "hmellor/tiny-random-Gemma2ForCausalLM": decoder("gemma2", bos=True),
    "hmellor/tiny-random-LlamaForCausalLM": LLAMA,
    "huggyllama/llama-7b": LLAMA,
    "intfloat/e5-mistral-7b-instruct": embedder("mistral"),
    "intfloat/e5-small": encoder(pooling="mean"),
    "intfloat/multilingual-e5-small": encoder(
        pooling="mean", hidden_size=384, num_attention_heads=6, ids=E5_IDS, num_hidden_layers=1
    ),
    "jason9693/Qwen2.5-1.5B-apeach": scorer("Qwen2", 2, QWEN_IDS),
    "lmsys/longchat-13b-16k": LLAMA,
    "meta-llama/llama-2-7b-hf": LLAMA,
    "meta-llama/Llama-3.1-8B": LLAMA,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama/Llama-3.2-1B": LLAMA,
    "meta-llama/Llama-3.2-1B-Instruct": decoder("llama", bos=True, seed=1, num_hidden_layers=3),
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": real_text,
    "mistralai/Ministral-8B-Instruct-2410": closing("mistral"),
    "mistralai/Mistral-7B-Instruct-v0.1": decoder("mistral", bos=True),
    "mistralai/Mistral-7B-Instruct-v0.3": decoder("mistral", bos=True),
    "nie3e/sentiment-polish-gpt2-small": scorer("GPT2", 3),
    "nomic-ai/nomic-embed-text-v1": encoder("nomic", pooling="mean", length=8192),
    "openai-community/gpt2": decoder("gpt2", max_position_embeddings=1024),
    "papluca/xlm-roberta-base-language-detection": encoder("xlm-roberta", "ForSequenceClassification", num_labels=4),
    "qwen/Qwen1.5-0.5B-Chat": decoder("qwen2"),
    "sentence-transformers/all-MiniLM-L12-v2": real_vectors,
    "sentence-transformers/stsb-roberta-base-v2": encoder("roberta", pooling="mean", normalize=False),
    "ssmits/Qwen2-7B-Instruct-embed-base": embedder("qwen2", "mean"),
    "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": scorer("Qwen3", 1, head_dim=16),
    # of models above
    "nm-testing/Llama3_2_1B_speculator.eagle3": eagle3("meta-llama/Llama-3.2-1B-Instruct"),
    "jeeejeee/llama32-3b-text2sql-spider": adapter("meta-llama/Llama-3.2-3B-Instruct"),
}


REVISIONS = {"nomic-ai/nomic-embed-text-v1": ["720244025c1a7e15661a174c63cce63c8218e52b"]}
"""Commits that tests ask for."""


def write_hub(home: Path, text: str) -> None:
    """Writes the models that are not there yet into the cache of a HF_HOME. `text`: what the tokenizer learns from."""
    trained = tokenizers.train(text).to_str()
    for name, recipe in MODELS.items():
        root = home / "hub" / _folder_name(name)
        if (root / "refs" / "main").exists():
            continue
        folder = root / "snapshots" / COMMIT
        shutil.rmtree(root, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            recipe(folder, trained)
        except ModelNotFound as error:  # weights that are not installed
            log.warning("%s: %s", name, error)
            continue
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(COMMIT)
        for revision in REVISIONS.get(name, ()):
            (root / "snapshots" / revision).symlink_to(COMMIT)


def _folder_name(name: str) -> str:
    return "models--" + name.replace("/", "--")
