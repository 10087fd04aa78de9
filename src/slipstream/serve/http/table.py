"""The list of modules with routes. A new route goes into one of them; a new module is added here."""

from __future__ import annotations

from slipstream.serve.http import adapters, admin, debug, page, sleep, system, tokenize
from slipstream.serve.http.anthropic import messages as anthropic_messages
from slipstream.serve.http.batch import batches, files
from slipstream.serve.http.cohere import chat as cohere_chat
from slipstream.serve.http.cohere import embed as cohere_embed
from slipstream.serve.http.docs_page import docs_routes
from slipstream.serve.http.ollama import chat as ollama_chat
from slipstream.serve.http.ollama import embed as ollama_embed
from slipstream.serve.http.ollama import models as ollama_models
from slipstream.serve.http.openai import chat, completions, models
from slipstream.serve.http.pooling import embeddings, pooling, rerank, score, tei, tei_tokens
from slipstream.serve.http.responses import responses
from slipstream.serve.http.routes import Route

MODULES = (
    completions, chat, responses, embeddings, pooling, score, rerank, tei, tei_tokens, models, tokenize, files, batches,
    anthropic_messages, ollama_chat, ollama_embed, ollama_models, cohere_chat, cohere_embed, system, admin,
    adapters, sleep, debug, page,
)  # fmt: skip


def all_routes() -> list[Route]:
    routes = [route for module in MODULES for route in module.ROUTES]
    return [*routes, *docs_routes(routes)]
