"""Folders as people publish them: without architectures, with only vocab.txt, under another task's name."""

import json

import numpy as np
import pytest
import torch
import transformers

from pool_bench import PoolBench, rewrite
from slipstream import LLM, PoolingParams, SamplingParams
from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from tiny import write_tiny
from tiny_encoder import write_modules, write_tiny_encoder

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["a", "the cat sat on the mat", "x" * 90]


def change(folder, **facts):
    """Facts of config.json; None takes one out."""
    config = json.loads((folder / "config.json").read_text()) | facts
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def vectors(folder, texts=TEXTS, **options):
    with LLM(str(folder), use_tqdm_on_load=False, num_threads=1, device="cpu", **options) as llm:
        return np.stack([one.outputs.data for one in llm.embed(texts)])


def expected(folder, texts=TEXTS):
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(texts)


def test_an_encoder_without_architectures(tmp_path):
    change(write_modules(write_tiny_encoder(tmp_path)), architectures=None)
    np.testing.assert_allclose(vectors(tmp_path), expected(tmp_path), atol=2e-5)


BACKBONES = [
    ("bert", "ForMaskedLM"), ("bert", "ForSequenceClassification"), ("roberta", "ForTokenClassification"),
    ("distilbert", "ForMaskedLM"), ("modernbert", "ForSequenceClassification"), ("bert", "ForQuestionAnswering"),
    ("distilbert", "ForQuestionAnswering"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "task"), BACKBONES)
def test_the_vectors_of_a_checkpoint_that_has_another_head(tmp_path, family, task, caplog):
    """By task="embed", where sentence-transformers takes the mean and no norm, and by a folder of its own."""
    write_tiny_encoder(tmp_path, family, task, num_labels=2)
    np.testing.assert_allclose(vectors(tmp_path, task="embed", normalize=False), expected(tmp_path), atol=2e-5)
    assert ("qa_outputs.weight" in caplog.text) is (task == "ForQuestionAnswering")  # told, and left out
    write_modules(tmp_path, "cls")
    np.testing.assert_allclose(vectors(tmp_path), expected(tmp_path), atol=2e-5)


def test_the_vectors_of_a_decoder_that_classifies(tmp_path):
    facts = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 2, "id2label": None}
    score = {"score.weight": torch.randn(2, 64, generator=torch.Generator().manual_seed(3))}
    write_modules(rewrite(write_tiny(tmp_path), facts, score, without=("lm_head.weight",)), "mean")
    options = {"num_pages": 64, "max_model_len": 128, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    wanted = np.stack([expected(tmp_path, text) for text in TEXTS])
    np.testing.assert_allclose(vectors(tmp_path, **options), wanted, atol=2e-5)


def test_a_decoder_without_architectures_continues_text(tmp_path):
    options = {"use_tqdm_on_load": False, "num_threads": 1, "device": "cpu", "num_pages": 32, "max_model_len": 64}
    found = []
    for folder in (write_tiny(tmp_path / "named"), change(write_tiny(tmp_path / "not"), architectures=None)):
        with LLM(str(folder), **options) as llm:
            found.append(llm.generate("abc", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"])
def test_a_decoder_that_classifies_tokens(tmp_path, family):
    """In the precision that people run, whole and in chunks, at every depth."""
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2", "phi3": "Phi3"}.get(family, family.capitalize())
    facts = {"architectures": [f"{name}ForTokenClassification"], "num_labels": 3, "id2label": None}
    generator = torch.Generator().manual_seed(3)
    head = {"score.weight": torch.randn(3, 64, generator=generator), "score.bias": torch.randn(3, generator=generator)}
    rewrite(write_tiny(tmp_path, family), facts, head, without=("lm_head.weight",))
    prompts = [list(range(5, 5 + n)) for n in (9, 1, 40, 17)]
    kind = getattr(transformers, f"{name}ForTokenClassification")
    model = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        wanted = [model(torch.tensor([ids])).logits[0].softmax(-1).numpy() for ids in prompts]
    for depth, tokens in ((0, 512), (1, 11), (2, 11)):
        with PoolBench(tmp_path, dtype="float32", depth=depth, max_num_batched_tokens=tokens) as bench:
            for found, theirs in zip(bench.pool(prompts, PoolingParams(task="token_classify")), wanted, strict=True):
                np.testing.assert_allclose(found, theirs, atol=1e-5)


def test_only_a_vocabulary(tmp_path):
    write_modules(write_tiny_encoder(tmp_path))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "s", "##at", "on", "mat", "a", "##x", "x"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    texts = ["the cat sat on the mat", "The x!", "xxxx a", ""]
    np.testing.assert_allclose(vectors(tmp_path, texts), expected(tmp_path, texts), atol=2e-5)


def test_a_folder_without_weights_and_an_adapter_say_so_before_anything_is_loaded(tmp_path):
    write_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="has no weights"):
        LLM(str(tmp_path), device="cpu")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(UnsupportedModel, match="a PEFT adapter .LORA. for org/base"):
        LLM(str(tmp_path), device="cpu")
    with LLM(str(tmp_path), device="cpu", load_format="dummy", num_pages=32, max_model_len=64, use_tqdm_on_load=False):
        pass
