"""A valid body for each POST route, over two scripted models: `tiny` generates, `pool` does every pooling task."""

from __future__ import annotations

from typing import Any

MESSAGES = [{"role": "user", "content": "hello"}]
_RERANK = {"query": "q", "documents": ["a", "b"]}

SAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/embeddings": {"input": "hello"},
    "/pooling": {"input": "hello"},
    "/classify": {"input": "hello"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/": {"query": "q", "texts": ["a", "b"]},
    "/embed": {"inputs": "hello"},
    "/embed_all": {"inputs": "hello"},
    "/embed_sparse": {"inputs": "hello"},
    "/predict": {"inputs": "hello"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}},
    "/decode": {"ids": [104, 105]},
    "/tokenize": {"prompt": "hello"},
    "/v1/batches": {"input_file_id": "file-sample", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/detokenize": {"tokens": [104, 105]},
}
