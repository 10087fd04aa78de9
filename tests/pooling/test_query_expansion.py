"""Late interaction against sentence-transformers: queries filled up with mask tokens, markers, words left out."""

from __future__ import annotations

import json
import string

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from slipstream.base.errors import UnsupportedModel
from tiny_encoder import MASK, write_tiny_encoder

sentence_transformers = pytest.importorskip("sentence_transformers")

QUERIES = ["where is it?", "x", "a rather long question about nothing, cut by some"]
DOCUMENTS = ["here, there; and everywhere.", "no", "the station is where it was: behind the mill!"]
FIXED = {"strategy": "fixed", "attend": False, "length": 32}


def write_json(folder, name, value):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(value))


def write_projection(folder):
    facts = {"in_features": 48, "out_features": 16, "bias": False, "module_input_name": "token_embeddings",
             "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip
    write_json(folder, "1_Dense/config.json", facts)
    weight = torch.randn(16, 48, generator=torch.Generator().manual_seed(3)) * 0.2
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")


def pylate(folder, family="bert", **settings):
    """As PyLate leaves it: a transformer and a projection, all else in one file."""
    write_projection(write_tiny_encoder(folder, family))
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    write_json(folder, "modules.json", listed)
    write_json(folder, "sentence_bert_config.json", {"max_seq_length": 100, "do_lower_case": False})
    known = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 32, "document_length": 40,
             "attend_to_expansion_tokens": False, "skiplist_words": list(string.punctuation),
             "model_type": "ColBERT"}  # fmt: skip
    write_json(folder, "config_sentence_transformers.json", known | settings)
    return folder


def newer(folder, family="bert", normalize=True, **settings):
    """As sentence-transformers saves one."""
    write_projection(write_tiny_encoder(folder, family))
    kinds = ["base.modules.transformer.Transformer", "base.modules.dense.Dense",
             "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"]  # fmt: skip
    paths = ["", "1_Dense", "2_MultiVectorMask"]
    if normalize:
        kinds.append("base.modules.normalize.Normalize")
        paths.append("3_Normalize")
        write_json(folder, "3_Normalize/config.json", {"module_input_name": "token_embeddings"})
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    write_json(folder, "modules.json", listed)
    write_json(folder, "2_MultiVectorMask/config.json", {"skiplist_words": [",", "."], "skiplist_tasks": ["document"]})
    write_json(folder, "sentence_bert_config.json", {"document_length": 50, **settings})
    write_json(
        folder,
        "config_sentence_transformers.json",
        {"prompts": {"query": "q: ", "document": "d: "}, "model_type": "MultiVectorEncoder"},
    )
    return folder


def stanford(folder, **settings):
    """A checkpoint of ColBERT's own."""
    write_tiny_encoder(folder, "bert")
    weights = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = torch.randn(16, 48, generator=torch.Generator().manual_seed(3)) * 0.2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    write_json(folder, "config.json", config | {"architectures": ["HF_ColBERT"]})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [like | {"content": f"[unused{i}]", "id": MASK + 1 + i} for i in (0, 1)]
    write_json(folder, "tokenizer.json", tokenizer)
    known = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 32, "doc_maxlen": 60,
             "dim": 16, "mask_punctuation": True, "attend_to_mask_tokens": False}  # fmt: skip
    write_json(folder, "artifact.metadata", known | settings)
    return folder


MAKERS = {
    "pylate": (pylate, {}),
    "pylate attends": (pylate, {"attend_to_expansion_tokens": True}),
    "pylate without": (pylate, {"do_query_expansion": False}),
    "mpnet": (pylate, {"family": "mpnet"}),
    "newer without": (newer, {}),
    "newer fixed": (newer, {"query_expansion": FIXED}),
    "newer at least": (newer, {"query_expansion": FIXED | {"strategy": "min"}}),
    "newer other token": (newer, {"query_expansion": FIXED | {"token": "[PAD]", "attend": True}}),
    "newer not normed": (newer, {"normalize": False, "query_expansion": FIXED}),
    "stanford": (stanford, {}),
    "stanford attends": (stanford, {"attend_to_mask_tokens": True, "mask_punctuation": False, "dim": None}),
}


@pytest.mark.parametrize("name", MAKERS)
def test_scores_and_vectors_are_those_of_the_original(tmp_path, name):
    make, settings = MAKERS[name]
    folder = str(make(tmp_path, **settings))
    theirs = sentence_transformers.MultiVectorEncoder(folder, device="cpu")
    if make is stanford:  # a space that real tokenizers drop
        theirs.prompts = {role: marker.strip() for role, marker in theirs.prompts.items()}
    asked = theirs.encode_query(QUERIES, convert_to_numpy=True)
    given = theirs.encode_document(DOCUMENTS, convert_to_numpy=True)
    expected = [[(query @ one.T).max(1).sum() for one in given] for query in asked]
    with LLM(folder, use_tqdm_on_load=False, num_threads=1, device="cpu") as llm:
        for query, scores in zip(QUERIES, expected, strict=True):
            found = [one.outputs.score for one in llm.score(query, DOCUMENTS, use_tqdm=False)]
            np.testing.assert_allclose(found, scores, rtol=2e-5, atol=2e-5)
        each = [one.outputs.score for one in llm.score(QUERIES, DOCUMENTS, use_tqdm=False)]
        np.testing.assert_allclose(each, np.diag(expected), rtol=2e-5, atol=2e-5)
        vectors = [one.outputs.array for one in llm.encode(QUERIES, prompt_name="query", use_tqdm=False)]
        assert [len(one) for one in vectors] == [len(one) for one in asked]
        for ours, other in zip(vectors, asked, strict=True):
            np.testing.assert_allclose(ours, other, atol=2e-5)


def test_one_query_alone_and_among_others_is_the_same(tmp_path):
    folder = str(pylate(tmp_path))
    with LLM(folder, use_tqdm_on_load=False, num_threads=1, device="cpu", dtype="float64", depth=2) as llm:
        alone = [llm.encode(text, prompt_name="query", use_tqdm=False)[0].outputs.array for text in QUERIES]
        mixed = llm.encode([*QUERIES, *DOCUMENTS], prompt_name="query", use_tqdm=False)
        for own, other in zip(alone, mixed, strict=False):
            np.testing.assert_allclose(own, other.outputs.array, atol=1e-12)
        # what is not seen still counts as tokens: the same ids all seen are something else
        (filled,) = llm.encode(QUERIES[0], prompt_name="query", use_tqdm=False)
        assert filled.prompt_token_ids[-3:] == [MASK] * 3
        (seen,) = llm.encode([filled.prompt_token_ids], use_tqdm=False)
        assert np.abs(seen.outputs.array - filled.outputs.array).max() > 1e-3


def test_unseen_tokens_need_a_model_that_sees_as_far(tmp_path):
    with pytest.raises(UnsupportedModel, match="queries to 32.*attends to 6 tokens to each side"):
        LLM(str(pylate(tmp_path, "modernbert")), use_tqdm_on_load=False)
