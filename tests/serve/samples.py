"""A valid body for each POST route, over two scripted models: `tiny` generates, `pool` does every pooling task,
with one class and without labels."""

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
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/decisions": {"input": "hello", "questions": [{"type": "predicate", "instructions": "Is it a greeting?"}]},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": MESSAGES},
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 4}},
    "/api/generate": {"model": "tiny", "prompt": "hello", "options": {"num_predict": 4}},
    "/api/embed": {"model": "pool", "input": "hello"},
    "/api/embeddings": {"model": "pool", "prompt": "hello"},
    "/api/show": {"model": "tiny"},
    "/api/pull": {"model": "tiny"},
    "/v2/chat": {"model": "tiny", "messages": MESSAGES, "max_tokens": 4},
    "/v2/embed": {"model": "pool", "texts": ["hello"]},
    "/detokenize": {"tokens": [104, 105]},
}
