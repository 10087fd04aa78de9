"""The files whose routes the server opens. A new API is a new file and one name here."""

from __future__ import annotations

from slipstream.serve.http import admin, metrics, system, tokenize
from slipstream.serve.http.docs_page import docs_routes
from slipstream.serve.http.openai import chat, completions, models
from slipstream.serve.http.pooling import embeddings, pooling, rerank, score, tei, tei_tokens
from slipstream.serve.http.routes import Route

FILES = (
    completions, chat, embeddings, pooling, score, rerank, tei, tei_tokens, models, tokenize, system, metrics, admin,
)  # fmt: skip


def all_routes() -> list[Route]:
    routes = [route for file in FILES for route in file.ROUTES]
    return [*routes, *docs_routes(routes)]
