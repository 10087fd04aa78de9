"""The choice of a format by the texts of a chat template."""

from __future__ import annotations

import pytest

from slipstream.base.errors import InvalidOption
from slipstream.parsers.families import (
    detect_reasoning,
    detect_tools,
    reasoning_format,
    tool_call_format,
)

# parts of the templates of these models that print the assistant's messages
TEMPLATES = {
    "Qwen3": ("'<tool_call>\\n{\"name\": \"' '<think>\\n' + reasoning_content + '\\n</think>", "hermes", "qwen3"),
    "Qwen3-Coder": ("'\\n<tool_call>\\n<function=' + tool_call.name + '>\\n'", "qwen3_coder", None),
    "DeepSeek-R1": ("'<｜tool▁calls▁begin｜>' + '\\n' + '```json' split('</think>')", "deepseek_v3", "qwen3"),
    "DeepSeek-V3.1": ("'<｜tool▁calls▁begin｜>' + name + '<｜tool▁sep｜>'", "deepseek_v31", None),
    "GLM-4.5": ("'\\n<tool_call>' + tc.name <arg_key>{{ k }}</arg_key> '</think>'", "glm45", "qwen3"),
    "gpt-oss": ("'to=functions.' + name + '<|channel|>commentary json' 'analysis'", "openai", "openai_gptoss"),
    "Mistral": ("'[TOOL_CALLS] ['", "mistral", None),
    "Magistral": ("[THINK] '[TOOL_CALLS]'", "mistral", "mistral"),
    "Kimi-K2": ("<|tool_calls_section_begin|><|tool_call_begin|> </think>", "kimi_k2", "kimi_k2"),
    "Granite": ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>", "granite", None),
    "Llama-3.1": ('{"name": function name, "parameters": dictionary of argument name', "llama3_json", None),
    "Llama-4": ("'<|python_start|>' + content", "llama4_pythonic", None),
    "Phi-4-mini": ("message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>'", "phi4_mini_json", None),
    "SmolLM2": ("'<|im_start|>' + message['role']", None, None),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_template_names_the_formats(model):
    template, tools, reasoning = TEMPLATES[model]
    assert (detect_tools(template), detect_reasoning(template)) == (tools, reasoning)
    assert tools is None or tool_call_format(tools)
    assert reasoning is None or reasoning_format(reasoning)


def test_a_model_without_template_has_none():
    assert detect_tools(None) is None and detect_reasoning(None) is None


def test_an_unknown_name_is_an_error_that_lists_the_names():
    with pytest.raises(InvalidOption, match="tool_call_parser is 'herms'; give one of hermes, qwen3_coder"):
        tool_call_format("herms")
    with pytest.raises(InvalidOption, match="reasoning_parser is 'o1'; give one of qwen3"):
        reasoning_format("o1")


def test_reasoning_is_open_where_the_prompt_begins_it():
    think, r1 = reasoning_format("qwen3"), reasoning_format("deepseek_r1")
    assert think.is_open("user: <think> what?\nassistant\n<think>\n")
    assert not think.is_open("<think>\n\n</think>\n\n") and not think.is_open("assistant\n")
    assert not think.is_open("the word <think> in a message")
    assert r1.is_open("assistant") and not r1.is_open("<think>\n</think>\n\n")
