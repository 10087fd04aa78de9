"""The lists of all routes. A new route goes into one of them; a new list is added here."""

from __future__ import annotations

from slipstream.serve.http.admin.admin import ADAPTER_ROUTES as ADAPTER_ROUTES
from slipstream.serve.http.admin.admin import ROUTES as ADMIN_ROUTES
from slipstream.serve.http.admin.admin import SLEEP_ROUTES as SLEEP_ROUTES
from slipstream.serve.http.admin.page import ROUTES as PAGE_ROUTES
from slipstream.serve.http.admin.page import docs_routes
from slipstream.serve.http.admin.system import DEBUG_ROUTES as DEBUG_ROUTES
from slipstream.serve.http.admin.system import ROUTES as SYSTEM_ROUTES
from slipstream.serve.http.admin.tokenize import MODEL_ROUTES as MODEL_ROUTES
from slipstream.serve.http.admin.tokenize import ROUTES as TOKENIZE_ROUTES
from slipstream.serve.http.admin.tokenize import TEI_TOKEN_ROUTES as TEI_TOKEN_ROUTES
from slipstream.serve.http.dialects.anthropic import ROUTES as ANTHROPIC_ROUTES
from slipstream.serve.http.dialects.batches import FILE_ROUTES as FILE_ROUTES
from slipstream.serve.http.dialects.batches import ROUTES as BATCH_ROUTES
from slipstream.serve.http.dialects.cohere import COHERE_EMBED_ROUTES as COHERE_EMBED_ROUTES
from slipstream.serve.http.dialects.cohere import ROUTES as COHERE_ROUTES
from slipstream.serve.http.dialects.completions import ROUTES as COMPLETION_ROUTES
from slipstream.serve.http.dialects.decisions import ROUTES as DECISION_ROUTES
from slipstream.serve.http.dialects.ollama import ROUTES as OLLAMA_ROUTES
from slipstream.serve.http.dialects.ollama_models import EMBED_ROUTES as OLLAMA_EMBED_ROUTES
from slipstream.serve.http.dialects.ollama_models import ROUTES as OLLAMA_MODEL_ROUTES
from slipstream.serve.http.dialects.openai_chat import ROUTES as CHAT_ROUTES
from slipstream.serve.http.dialects.responses import ROUTES as RESPONSES_ROUTES
from slipstream.serve.http.pooling.embeddings import POOLING_ROUTES as POOLING_ROUTES
from slipstream.serve.http.pooling.embeddings import ROUTES as EMBEDDING_ROUTES
from slipstream.serve.http.pooling.rerank import ROUTES as RERANK_ROUTES
from slipstream.serve.http.pooling.rerank import SCORE_ROUTES as SCORE_ROUTES
from slipstream.serve.http.pooling.tei import ROUTES as TEI_ROUTES
from slipstream.serve.http.server.request import Route

LISTS = (
    COMPLETION_ROUTES,
    CHAT_ROUTES,
    RESPONSES_ROUTES,
    DECISION_ROUTES,
    EMBEDDING_ROUTES,
    POOLING_ROUTES,
    SCORE_ROUTES,
    RERANK_ROUTES,
    TEI_ROUTES,
    TEI_TOKEN_ROUTES,
    MODEL_ROUTES,
    TOKENIZE_ROUTES,
    FILE_ROUTES,
    BATCH_ROUTES,
    ANTHROPIC_ROUTES,
    OLLAMA_ROUTES,
    OLLAMA_EMBED_ROUTES,
    OLLAMA_MODEL_ROUTES,
    COHERE_ROUTES,
    COHERE_EMBED_ROUTES,
    SYSTEM_ROUTES,
    ADMIN_ROUTES,
    ADAPTER_ROUTES,
    SLEEP_ROUTES,
    DEBUG_ROUTES,
    PAGE_ROUTES,
)


def all_routes() -> list[Route]:
    routes = [route for routes in LISTS for route in routes]
    return [*routes, *docs_routes(routes)]
