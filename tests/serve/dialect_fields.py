"""Values for the fields of the routes in the words of other APIs: (value, beside, without), by route and field."""

from __future__ import annotations

from typing import Any

from serve.samples import MESSAGES

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
TOOL = {"name": "now", "input_schema": {"type": "object"}}
OTHER = [{"role": "user", "content": "bye"}]

DIALECTS: dict[tuple[str, str], tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    ("/api/generate", "prompt"): ("other", {}, ()),
    ("/api/generate", "system"): ("Be short.", {}, ()),
    ("/api/generate", "raw"): (True, {}, ()),
    ("/api/embed", "input"): ("other", {}, ()),
    ("/api/embed", "truncate"): (False, {}, ()),
    ("/api/embed", "options"): ({"num_ctx": 2}, {}, ()),
    ("/api/embeddings", "prompt"): ("other", {}, ()),
    ("/api/embeddings", "options"): ({"temperature": 1}, {}, ()),
    ("/api/show", "name"): ("other", {}, ()),
    ("/api/show", "verbose"): (True, {}, ()),
    ("/api/pull", "name"): ("other", {}, ()),
    ("/api/pull", "stream"): (False, {}, ()),
    ("/v2/chat", "messages"): (OTHER, {}, ()),
    ("/v2/chat", "tools"): ([FUNCTION], {}, ()),
    ("/v2/chat", "tool_choice"): ("REQUIRED", {"tools": [FUNCTION]}, ()),
    ("/v2/chat", "strict_tools"): (True, {"tools": [FUNCTION], "tool_choice": "REQUIRED"}, ()),
    ("/v2/chat", "stop_sequences"): (["z"], {}, ()),
    ("/v2/chat", "k"): (3, {}, ()),
    ("/v2/chat", "p"): (0.5, {}, ()),
    ("/v2/chat", "thinking"): ({"type": "enabled"}, {}, ()),
    ("/v2/embed", "texts"): (["other"], {}, ()),
    ("/v2/embed", "input_type"): ("search_query", {}, ()),
    ("/v2/embed", "embedding_types"): (["binary"], {}, ()),
    ("/v2/embed", "output_dimension"): (4, {}, ()),
    ("/v2/embed", "max_tokens"): (2, {}, ()),
    ("/v2/embed", "truncate"): ("NONE", {}, ()),
    ("/v2/embed", "priority"): (3, {}, ()),
}
for path in ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/pull", "/v2/chat"):
    DIALECTS[path, "model"] = ("other", {}, ())
    DIALECTS[path, "keep_alive"] = (0, {}, ())
DIALECTS["/v2/embed", "model"] = ("vectors", {}, ())
for path in ("/api/chat", "/api/generate"):
    DIALECTS[path, "stream"] = (False, {}, ())
    DIALECTS[path, "truncate"] = (False, {"options": {"num_ctx": 3}}, ())
    DIALECTS[path, "format"] = (SCHEMA, {}, ())
    DIALECTS[path, "options"] = ({"top_k": 3, "num_predict": 4}, {}, ())
    DIALECTS[path, "think"] = (True, {}, ())
DIALECTS["/api/chat", "messages"] = (OTHER, {}, ())
DIALECTS["/api/chat", "tools"] = ([FUNCTION], {}, ())
for path in ("/v1/messages", "/v1/messages/count_tokens"):
    DIALECTS[path, "model"] = ("pool", {}, ())
    DIALECTS[path, "messages"] = (OTHER * 2, {}, ())
    DIALECTS[path, "system"] = ("Be short.", {}, ())
    DIALECTS[path, "tools"] = ([TOOL], {}, ())
    DIALECTS[path, "tool_choice"] = ({"type": "none"}, {"tools": [TOOL]}, ())
    DIALECTS[path, "thinking"] = ({"type": "enabled"}, {}, ())
    DIALECTS[path, "output_config"] = ({"effort": "high"}, {}, ())
DIALECTS["/v1/messages", "output_format"] = ({"type": "json_schema", "schema": SCHEMA}, {}, ())
DIALECTS["/v1/messages/count_tokens", "output_format"] = ({"type": "xml"}, {}, ())
DIALECTS["/v1/messages", "output_config"] = ({"format": {"type": "json_schema", "schema": SCHEMA}}, {}, ())
DIALECTS["/v1/messages", "stop_sequences"] = (["z"], {}, ())
DIALECTS["/v1/messages", "max_tokens"] = (3, {}, ())

DIALECTS |= {
    ("/v1/decisions", "input"): ("other", {}, ()),
    ("/v1/decisions", "questions"): ([{"type": "predicate", "instructions": "Is it true?"}], {}, ()),
    ("/v1/decisions", "model"): ("pool", {}, ()),
    ("/v1/decisions", "priority"): (3, {}, ()),
    ("/v1/decisions", "cache_salt"): ("s", {}, ()),
}
EFFORT = {"effort": "high"}
DIALECTS |= {
    ("/v1/responses", "input"): ("other", {}, ()),
    ("/v1/responses", "model"): ("pool", {}, ()),
    ("/v1/responses", "instructions"): ("Be short.", {}, ()),
    ("/v1/responses", "previous_response_id"): ("resp_other", {}, ()),
    ("/v1/responses", "store"): (False, {}, ()),
    ("/v1/responses", "max_output_tokens"): (3, {}, ()),
    ("/v1/responses", "tools"): ([FUNCTION["function"] | {"type": "function"}], {}, ()),
    ("/v1/responses", "tool_choice"): ("none", {"tools": [FUNCTION["function"] | {"type": "function"}]}, ()),
    ("/v1/responses", "parallel_tool_calls"): (
        False, {"tools": [FUNCTION["function"] | {"type": "function"}], "tool_choice": "required"}, ()
    ),
    ("/v1/responses", "text"): ({"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, {}, ()),
    ("/v1/responses", "reasoning"): (EFFORT, {}, ()),
    ("/v1/responses", "truncation"): ("auto", {}, ()),
    ("/v1/responses", "metadata"): ({"name": "mine"}, {}, ()),
    ("/v1/responses", "include"): (["file_search_call.results"], {}, ()),
}  # fmt: skip

assert MESSAGES != OTHER
