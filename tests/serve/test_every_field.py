"""Every field of every request does something, or is refused by name.

The walk goes over the types that decode bodies, so a new field has to be listed here. A field does something if the
answer, or what reaches the engine, differs from that of the same request without it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import msgspec.inspect
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from sampling_values import VALUES as OF_PARAMS
from scripted_core import EVERY_TASK, ScriptedCore, facts
from serve.asgi import Door, add_batch_store
from serve.dialect_fields import DIALECTS
from serve.samples import MESSAGES, SAMPLES
from slipstream.base import typed
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.params.sampling import FIELD, PARAMS, names_for
from slipstream.serve.http.generation import fields
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.state import State
from slipstream.serve.http.table import all_routes
from tiny_tokenizer import write_byte_tokenizer

ROUTES = {
    route.path: route
    for route in all_routes()
    if route.body is not None and route.path != "/" and route.access != "admin"  # the latter: test_lora_routes.py
}
LABELS = {  # ask for nothing, and their description says so
    "user", "metadata", "safety_identifier", "prompt_cache_key", "cache_control", "user_profile_id", "workspace_id",
}  # fmt: skip

# what a field is set to, beside what it needs; None: the value is refused
VALUES: dict[str, Any] = {
    **{name: OF_PARAMS[name] for name in names_for(FIELD)},
    "model": "tiny", "stop": "z", "logit_bias": {"5": 1.0}, "max_tokens": 3, "min_tokens": 2,
    "truncate_prompt_tokens": 3, "stream": True, "add_special_tokens": True, "return_token_ids": True, "echo": True,
    "max_completion_tokens": 3,
    "encoding_format": "base64", "dimensions": 4, "normalize": False, "truncation_side": "left",
    "task": "token_embed", "top_n": 1, "return_documents": False, "instruction": "be exact", "max_tokens_per_doc": 1,
    "raw_scores": True, "return_text": True, "truncate": False, "truncation_direction": "left", "activation": False,
    "use_activation": False, "softmax": False, "return_token_strs": True,
    "add_generation_prompt": False, "prompt_name": "query",
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a+"}, "guided_json": {"type": "array"},
    "guided_regex": "a+", "guided_choice": ["a", "b"], "guided_grammar": 'start: "a"',
    "guided_whitespace_pattern": " ?", "vllm_xargs": {"level": 2},
}  # fmt: skip
# fields that need others beside them
WITH: dict[str, dict[str, Any]] = {
    "include_stop_str_in_output": {"stop": "z"},
    "guided_whitespace_pattern": {"guided_json": {"type": "object"}},
    "stream_options": {"stream": True},
    "logprob_token_ids": {"logprobs": True},
    "return_tokens_as_token_ids": {"logprobs": True},
    "top_logprobs": {"logprobs": True},
    "step_tag_id": {"task": "token_classify"},
    "returned_token_ids": {"task": "token_classify"},
}
VALUES |= {
    "stream_options": {"include_usage": True},
    "return_tokens_as_token_ids": True, "top_logprobs": 2, "logprobs": True, "step_tag_id": 104,
    "returned_token_ids": [0],
}  # fmt: skip
SPECIAL_TEXT = {"grammar": 'start: "a" <|im_end|> <|im_end|>'}
EXPIRES = {"anchor": "created_at", "seconds": 3600}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
# where a route needs another value or another request around it: (value, beside, without)
SPECIAL: dict[tuple[str, str], tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    ("/v1/completions", "prompt"): ("other", {}, ()),
    ("/v1/completions", "logprobs"): (1, {}, ()),
    ("/v1/completions", "logprob_token_ids"): ([9], {"logprobs": 1}, ()),
    ("/v1/completions", "return_tokens_as_token_ids"): (True, {"logprobs": 1}, ()),
    ("/v1/completions", "model"): ("pool", {}, ()),
    ("/v1/completions", "add_special_tokens"): (False, {}, ()),
    ("/v1/completions", "suffix"): ("there", {}, ()),
    ("/v1/completions", "prompt_embeds"): ("AAAA", {}, ()),
    ("/v1/completions", "use_beam_search"): (True, {"n": 2}, ()),
    ("/v1/completions", "length_penalty"): (2.0, {"n": 2}, ()),
    ("/v1/chat/completions", "use_beam_search"): (True, {"n": 2}, ()),
    ("/v1/chat/completions", "length_penalty"): (2.0, {"n": 2}, ()),
    ("/v1/chat/completions", "model"): ("pool", {}, ()),
    ("/v1/chat/completions", "messages"): ([{"role": "user", "content": "bye"}], {}, ()),
    ("/v1/chat/completions", "max_completion_tokens"): (3, {}, ("max_tokens",)),
    ("/v1/chat/completions", "continue_final_message"): (True, {}, ()),
    ("/v1/chat/completions", "chat_template_kwargs"): ({"shout": True}, {}, ()),
    ("/v1/chat/completions", "tools"): (TOOLS, {}, ()),
    ("/v1/chat/completions", "tool_choice"): ("required", {"tools": TOOLS}, ()),
    ("/v1/chat/completions", "parallel_tool_calls"): (False, {"tools": TOOLS, "tool_choice": "required"}, ()),
    ("/v1/chat/completions", "include_reasoning"): (False, {"enable_thinking": True}, ()),
    ("/v1/chat/completions", "enable_thinking"): (True, {}, ()),
    ("/v1/chat/completions", "reasoning_effort"): ("low", {}, ()),
    ("/v1/embeddings", "messages"): (MESSAGES, {}, ("input",)),
    ("/v1/embeddings", "add_generation_prompt"): (True, {"messages": MESSAGES}, ("input",)),
    ("/v1/embeddings", "continue_final_message"): (True, {"messages": MESSAGES}, ("input",)),
    ("/v1/embeddings", "chat_template_kwargs"): ({"shout": True}, {"messages": MESSAGES}, ("input",)),
    ("/pooling", "activation"): (False, {"task": "classify"}, ()),
    ("/pooling", "use_activation"): (False, {"task": "classify"}, ()),
    ("/pooling", "softmax"): (False, {"task": "classify"}, ()),
    ("/tokenize", "messages"): (MESSAGES, {}, ("prompt",)),
    ("/tokenize", "inputs"): ("hello", {}, ("prompt",)),
    ("/tokenize", "prompt_name"): ("query", {"inputs": "hello"}, ("prompt",)),
    ("/tokenize", "add_generation_prompt"): (False, {"messages": MESSAGES}, ("prompt",)),
    ("/tokenize", "continue_final_message"): (True, {"messages": MESSAGES}, ("prompt",)),
    ("/tokenize", "chat_template_kwargs"): ({"shout": True}, {"messages": MESSAGES}, ("prompt",)),
    ("/tokenize", "add_special_tokens"): (False, {}, ()),
    ("/tokenize", "model"): ("nothing", {}, ()),
    ("/detokenize", "model"): ("nothing", {}, ()),
    ("/decode", "model"): ("nothing", {}, ()),
    ("/decode", "skip_special_tokens"): (False, {"ids": [104, 256]}, ()),
    ("/similarity", "parameters"): ({"truncate": False}, {}, ()),
    ("/v1/batches", "input_file_id"): ("file-other", {}, ()),
    ("/v1/batches", "endpoint"): ("/v1/embeddings", {}, ()),
    ("/v1/batches", "completion_window"): ("1h", {}, ()),
    ("/v1/batches", "metadata"): ({"name": "mine"}, {}, ()),
    ("/v1/batches", "output_expires_after"): (EXPIRES, {}, ()),
}
SPELLED = {"messages": [{"role": "user", "content": "<|im_end|>"}]}
SPECIAL |= {
    ("/v1/chat/completions", "allow_control_tokens"): (True, SPELLED, ()),
    ("/v1/embeddings", "allow_control_tokens"): (True, SPELLED, ("input",)),
    ("/tokenize", "allow_control_tokens"): (True, SPELLED, ("prompt",)),
}
SPECIAL |= DIALECTS
for path in ROUTES:
    if path.endswith("score"):
        for left, right in (("data_1", "data_2"), ("queries", "documents")):
            SPECIAL[path, left] = ("c", {right: "b"}, ("text_1", "text_2"))
            SPECIAL[path, right] = ("c", {left: "a"}, ("text_1", "text_2"))
        SPECIAL[path, "text_1"], SPECIAL[path, "text_2"] = ("c", {}, ()), ("c", {}, ())
    if path.endswith("rerank"):
        texts = {"texts": ["a", "b"]}
        for name in ("return_text", "truncate", "truncation_direction"):
            SPECIAL[path, name] = (VALUES[name], texts, ("documents",))
        SPECIAL[path, "query"] = ("other", {}, ())
        SPECIAL[path, "documents"], SPECIAL[path, "texts"] = (["c"], {}, ()), (["c"], {}, ("documents",))
        SPECIAL[path, "max_tokens_per_doc"] = (1, {"documents": ["one two", "b"]}, ())
        SPECIAL[path, "return_documents"] = (path == "/v2/rerank", {}, ())
for path, name, value in [
    ("/v1/embeddings", "input", "other"), ("/pooling", "input", "other"), ("/classify", "input", "other"),
    ("/embed", "inputs", "other"), ("/embed_all", "inputs", "other"), ("/embed_sparse", "inputs", "other"),
    ("/predict", "inputs", "other"), ("/decode", "ids", [105]), ("/detokenize", "tokens", [105]),
    ("/tokenize", "prompt", "other"),
    ("/similarity", "inputs", {"source_sentence": "c", "sentences": ["b", "c"]}),
]:  # fmt: skip
    SPECIAL[path, name] = (value, {}, ())

FIELDS = [(path, field) for path, route in ROUTES.items() for field in route.body.__struct_fields__]


def is_label(kind: type[msgspec.Struct], name: str) -> bool:
    return "without effect" in described(kind, name)


def described(kind: type[msgspec.Struct], name: str) -> str:
    hint = get_type_hints(kind, include_extras=True)[name]
    return next((each.description or "" for each in get_args(hint) if isinstance(each, msgspec.Meta)), "")


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


POOL = msgspec.structs.replace(
    EVERY_TASK, matryoshka="any", prompts={"query": "q: "}, max_seq_length=32, pair_template=None, labels=("yes",)
)
VECTORS = PoolingInfo(tasks=("embed",), embed_size=8, token_size=8, max_seq_length=32)


@pytest.fixture(scope="module")
def door(runner, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    config = folder / "tokenizer_config.json"
    given = json.loads(config.read_text())
    given["chat_template"] += (
        "{% if shout %}!{% endif %}{{ tools | length if tools }}{{ reasoning_effort }}"
        "{% if enable_thinking %}<think>{% endif %}{# </think> #}"
    )
    config.write_text(json.dumps(given))
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", 256)]
    )
    backend.save(str(folder / "tokenizer.json"))

    async def open_door():
        engine, core = await ScriptedCore.open(
            facts(folder, max_model_len=128),
            facts(folder, "pool", pooling=POOL),
            facts(folder, "vectors", pooling=VECTORS),
            facts(folder, "ends", eos_token_ids=(0,)),
        )
        return Door(App(State(ServerSettings(), engine), all_routes()), core)

    door = runner.run(open_door())
    add_batch_store(door, folder)
    yield door
    runner.run(door.state.engine.close())


def outcome(runner, door, path, body) -> tuple[int, Any, Any]:
    """Status, answer and what reached the engine, without what differs between any two requests."""
    door.core.submits.clear()
    exchange = runner.run(door.post(path, body))
    answer = exchange.parsed()
    if exchange.status != 200:
        error = answer.get("error")
        answer = {"said": exchange.said, "param": error.get("param") if isinstance(error, dict) else None}
    sent = [
        (each.prompt_token_ids, msgspec.structs.asdict(each.params), each.priority, each.cache_salt, each.model)
        for each in door.core.submits
    ]
    return exchange.status, _plain(answer), _plain(sent)


DURATIONS = {"total_duration", "prompt_eval_duration", "eval_duration"}
VARIABLE = {"id", "created", "query_key", "created_at", "expires_at", *DURATIONS}  # differ between any two requests


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if name not in VARIABLE}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def bodies(path: str, field: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request without the field, and the same with it."""
    base = dict(SAMPLES[path])
    if (path, field) in SPECIAL:
        value, beside, without = SPECIAL[path, field]
    else:
        value, beside, without = VALUES[field], WITH.get(field, {}), ()
    for name in without:
        base.pop(name, None)
    base |= beside
    return ({name: each for name, each in base.items() if name != field} | _needed(path, field)), base | {field: value}


def _needed(path: str, field: str) -> dict[str, Any]:
    """The field itself where no request can do without it."""
    return {field: SAMPLES[path][field]} if field in SAMPLES[path] and (path, field) in SPECIAL else {}


@pytest.mark.parametrize(("path", "field"), FIELDS, ids=lambda value: value)
def test_a_field_does_something_or_is_refused_by_name(runner, door, path, field):
    check_field(runner, door, path, field)


def test_a_field_that_is_dropped_is_caught(runner, door, monkeypatch):
    monkeypatch.setattr(fields, "_SAMPLING_FIELDS", fields._SAMPLING_FIELDS - {"top_k"})
    with pytest.raises(AssertionError, match="top_k of /v1/completions changes nothing"):
        check_field(runner, door, "/v1/completions", "top_k")


def test_a_field_that_is_refused_without_its_name_is_caught(runner, door, monkeypatch):
    monkeypatch.setattr(typed, "unsupported_fields", lambda kind: {})
    with pytest.raises(AssertionError):
        check_field(runner, door, "/v1/completions", "best_of")


BEAMS = {"model": "ends", "use_beam_search": True, "n": 2}
NOT_WITH_BEAMS = (
    "use_beam_search",
    "spaces_between_special_tokens",  # this tokenizer writes none
    "parallel_tool_calls",  # needs more tokens than SAMPLES has: test_chat_beams.py
)
BESIDE_BEAMS = {
    "include_stop_str_in_output": {},
    "stream_options": {},
    "top_logprobs": {},
    "skip_special_tokens": {"structured_outputs": SPECIAL_TEXT},
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_field_with_beam_search_does_something_or_is_refused_by_name(runner, door, path, monkeypatch):
    for field, beside in BESIDE_BEAMS.items():
        monkeypatch.setitem(WITH, field, beside)
    monkeypatch.setitem(SPECIAL, (path, "length_penalty"), (-9.0, {}, ()))
    monkeypatch.setitem(SAMPLES, path, SAMPLES[path] | BEAMS)
    for field in ROUTES[path].body.__struct_fields__:
        if field not in NOT_WITH_BEAMS:
            check_field(runner, door, path, field)


def check_field(runner, door, path, field):
    kind = ROUTES[path].body
    base = SAMPLES[path]
    words = described(kind, field)
    if is_label(kind, field):
        assert field in LABELS
        assert outcome(runner, door, path, base | {field: "mine"}) == outcome(runner, door, path, base)
        return
    if words.startswith("not supported"):
        status, answer, sent = outcome(runner, door, path, base | {field: {"some": "thing"}})
        assert status in (400, 422) and not sent, answer
        assert field in answer["said"], answer
        assert answer["param"] in (None, field)
        return
    before, after = bodies(path, field)
    first, second = outcome(runner, door, path, before), outcome(runner, door, path, after)
    if second[0] != 200:
        said = second[1]
        assert second[0] < 500 and (field in said["said"] or said["param"] == field), said
        assert said["param"] in (None, field), said
    assert second != first, f"{field} of {path} changes nothing"


USAGE = {"include_usage": True, "continuous_usage_stats": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OTHER = {"type": "object", "properties": {"b": {"type": "string"}}}
TAG = [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}]
NAMED = {"type": "function", "function": {"name": "now"}}
LATER = {"type": "function", "function": {"name": "later"}}
BOTH = {"tools": [NAMED, LATER]}
ALLOWED = {"mode": "auto", "tools": [NAMED]}
FLAT = {"tools": [{"type": "function", "name": "now"}, {"type": "function", "name": "later"}]}
PAIR = {"tools": [{"name": "now", "input_schema": SCHEMA}, {"name": "later", "input_schema": OTHER}]}
FORM = {"type": "json_schema", "name": "a", "schema": SCHEMA}
THINKS = {"type": "enabled", "budget_tokens": 5}
TWICE = {"max_pattern_size": 3, "min_count": 2}
# path, what is beside the field, its name, its value without the field inside, and with it
NESTED = [
    ("/v1/completions", {}, "repetition_detection", TWICE, TWICE | {"min_pattern_size": 2}),
    ("/v1/completions", {"stream": True}, "stream_options", {}, {"include_usage": True}),
    ("/v1/completions", {"stream": True}, "stream_options", {"include_usage": True}, USAGE),
    ("/similarity", {}, "parameters", {}, {"truncate": False}),
    ("/similarity", {}, "parameters", {}, {"truncation_direction": "left"}),
    ("/similarity", {}, "parameters", {}, {"prompt_name": "query"}),
    ("/v1/batches", {}, "output_expires_after", None, EXPIRES),
    ("/v1/completions", {}, "response_format", {"type": "text"},
     {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    ("/v1/completions", {}, "response_format", {"type": "structural_tag"}, {"type": "structural_tag", "format": {}}),
    ("/v1/completions", {}, "response_format", {"type": "structural_tag"},
     {"type": "structural_tag", "structures": TAG}),
    ("/v1/completions", {}, "response_format", {"type": "structural_tag"},
     {"type": "structural_tag", "triggers": ["<"]}),
    ("/v1/chat/completions", BOTH, "tool_choice", LATER, NAMED),
    ("/v1/chat/completions", BOTH, "tool_choice", "auto", {"type": "allowed_tools", "allowed_tools": ALLOWED}),
    ("/v1/responses", {}, "text", {}, {"format": FORM}),
    ("/v1/responses", {}, "reasoning", {}, {"effort": "high"}),
    ("/v1/responses", FLAT, "tool_choice", {"type": "function", "name": "later"}, {"type": "function", "name": "now"}),
    ("/v1/responses", FLAT, "tool_choice", "auto",
     {"type": "allowed_tools", "mode": "required", "tools": FLAT["tools"]}),
    ("/v1/messages", PAIR, "tool_choice", {"type": "auto"}, {"type": "any"}),
    ("/v1/messages", PAIR, "tool_choice", {"type": "tool", "name": "later"}, {"type": "tool", "name": "now"}),
    ("/v1/messages", PAIR, "tool_choice", {"type": "any"}, {"type": "any", "disable_parallel_tool_use": True}),
    ("/v1/messages", {}, "thinking", {"type": "disabled"}, {"type": "enabled"}),
    ("/v1/messages", {}, "thinking", {"type": "enabled"}, THINKS),
    ("/v1/messages", {}, "output_config", {}, {"effort": "high"}),
    ("/v1/messages", {}, "output_config", {}, {"format": {"type": "json_schema", "schema": SCHEMA}}),
    ("/v1/messages", {}, "output_format", {"type": "json_schema", "schema": OTHER},
     {"type": "json_schema", "schema": SCHEMA}),
    ("/v2/chat", {}, "response_format", {"type": "json_object"}, {"type": "json_object", "json_schema": SCHEMA}),
    ("/v2/chat", {}, "response_format", {"type": "json_object"}, {"type": "json_object", "schema": SCHEMA}),
    ("/v2/chat", {}, "thinking", {"type": "disabled"}, {"type": "enabled"}),
    ("/v2/chat", {}, "thinking", {"type": "enabled"}, {"type": "enabled", "token_budget": 5}),
    ("/api/embed", {}, "options", {}, {"num_ctx": 2}),
    *(
        ("/api/chat", {}, "options", {"num_predict": 4}, {"num_predict": 4, name: value})
        for name, value in {
            **{row.ollama: OF_PARAMS[ours] for ours, row in PARAMS.items() if row.ollama},
            "num_predict": 3, "num_ctx": 2,
        }.items()
    ),
]  # fmt: skip
ALIKE = {  # routes whose field has the same type: checked with one of them
    "/v1/chat/completions": "/v1/completions", "/v1/messages/count_tokens": "/v1/messages",
    "/api/generate": "/api/chat", "/api/embeddings": "/api/embed",
}  # fmt: skip


@pytest.mark.parametrize(("path", "beside", "name", "without", "value"), NESTED, ids=str)
def test_a_field_inside_a_field_does_something(runner, door, path, beside, name, without, value):
    base = SAMPLES[path] | beside
    first = outcome(runner, door, path, base | ({} if without is None else {name: without}))
    second = outcome(runner, door, path, base | {name: value})
    assert second[0] == 200 and second != first


def nested_fields():
    """Path, name, struct and field of every field inside a field that has an effect or is refused."""
    for path, route in ROUTES.items():
        for name, hint in get_type_hints(route.body).items():
            for kind in (
                hint,
                *(get_args(hint) if get_origin(hint) is not list else ()),
            ):  # items: test_nested_fields.py
                if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, msgspec.Struct):
                    for field in kind.__struct_fields__:
                        if name != "inputs" and not is_label(kind, field):
                            yield path, name, kind, field


def test_every_field_inside_a_field_is_listed():
    walked = {(path, name, field) for path, _, name, _, value in NESTED for field in value}
    for path, name, kind, field in nested_fields():
        same = {(each, name, field) for each in (path, ALIKE.get(path))}
        assert same & walked or described(kind, field).startswith("not supported"), (path, name, field)


REFUSED = [each for each in nested_fields() if described(each[2], each[3]).startswith("not supported")]


@pytest.mark.parametrize(("path", "name", "kind", "field"), REFUSED, ids=str)
def test_a_field_inside_a_field_that_is_not_supported_is_refused_by_name(runner, door, path, name, kind, field):
    needed = {each.encode_name: "enabled" for each in msgspec.structs.fields(kind) if each.required}
    status, answer, sent = outcome(runner, door, path, SAMPLES[path] | {name: needed | {field: {"some": "thing"}}})
    assert status in (400, 422) and not sent and f"{name}.{field} is not supported" in answer["said"], answer
    assert answer["param"] in (None, f"{name}.{field}")


def structs_of(kind: Any) -> set[type[msgspec.Struct]]:
    """All structs in a type of msgspec.inspect."""
    inner = [getattr(kind, name) for name in ("type", "item_type", "value_type") if hasattr(kind, name)]
    inner += [*getattr(kind, "types", ()), *(field.type for field in getattr(kind, "fields", ()))]
    own = {kind.cls} if isinstance(kind, msgspec.inspect.StructType) else set()
    return own.union(*map(structs_of, inner))


def test_every_field_that_is_not_supported_refuses_a_value():
    kinds = set().union(*(structs_of(msgspec.inspect.type_info(route.body)) for route in ROUTES.values()))
    checked = 0
    for kind in kinds:
        needed = {each.name: "x" for each in msgspec.structs.fields(kind) if each.required}
        for field in kind.__struct_fields__:
            if described(kind, field).startswith("not supported"):
                with pytest.raises(ValueError, match=f"{field} is not supported"):
                    kind(**needed, **{field: {"some": "thing"}})
                checked += 1
    assert checked > 100
