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
    "GLM-4.5": ("'\\n<tool_call>' + tc.name <arg_key>{{ k }}</arg_key> '</think>'", "glm45", "glm45"),
    "gpt-oss": ("'to=functions.' + name + '<|channel|>commentary json' 'analysis'", "openai", "openai_gptoss"),
    "Mistral": ("'[TOOL_CALLS] ['", "mistral", None),
    "Magistral": ("[THINK] '[TOOL_CALLS]'", "mistral", "mistral"),
    "Kimi-K2": ("<|tool_calls_section_begin|><|tool_call_begin|> </think>", "kimi_k2", "kimi_k2"),
    "Granite": ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>", "granite", None),
    "Llama-3.1": ('{"name": function name, "parameters": dictionary of argument name', "llama3_json", None),
    "Llama-4": ("'<|python_start|>' + content", "llama4_pythonic", None),
    "Phi-4-mini": ("message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>'", "phi4_mini_json", None),
    "LFM2": ("List of tools: <|tool_list_start|>[", "lfm2", None),
    "LFM2.5": ("<|tool_call_start|>[' + calls + ']<|tool_call_end|>' '</think>'", "lfm2", "qwen3"),
    "Gemma 4": ("'<|tool_call>call:' + name '<|channel>thought\\n'", "gemma4", "gemma4"),
    "FunctionGemma": ("<start_function_call>call:{{ name }}{", "functiongemma", None),
    "DeepSeek-V3.2": ("set dsml = '｜DSML｜' '<' + dsml + 'function_calls>' '</think>'", "deepseek_v32", "deepseek_v4"),
    "DeepSeek-V4": ("set dsml = '｜DSML｜' '<' + dsml + 'tool_calls>' '</think>'", "deepseek_v4", "deepseek_v4"),
    "MiniMax-M2": ("<minimax:tool_call> <invoke name=\"' + name <response> '</think>'", "minimax_m2", "minimax_m2"),
    "Nemotron 3": ("<tool_call>\\n<function=' + name '<think></think>'", "qwen3_coder", "qwen3"),
    "Step 3": ("<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=", "step3", None),
    "Apertus": ("set calls = '<|tools_prefix|>' '<|tools_suffix|>' '<|inner_prefix|>'", "apertus", "apertus"),
    "OLMo 3": ("<functions></functions> <function_calls>", "olmo3", None),
    "Command A": ("<|START_THINKING|> <|START_ACTION|>[", "cohere_command3", "cohere_command3"),
    "xLAM": ("make calls in a single JSON array: [{", "xlam", None),
    "Kimi K3": ("'<|open|>' + tag '<|sep|>' '<|close|>'", "kimi_k3", "kimi_k3"),
    "Hy3": ("'<tool_sep{}>'.format(':opensource') '</think{}>'", "hy_v3", "hy_v3"),
    "Hunyuan-A13B": ("<tool_calls>[{ '</think>\\n<answer>\\n'", "jamba", "hunyuan_a13b"),
    "ERNIE 4.5": ("<tool_call>{ '</think>\\n\\n<response>\\n' '</response>'", "hermes", "ernie45"),
    "Granite 3.3": ("<|start_of_role|> <|tool_call|> <think></think><response></response>", "granite", "ernie45"),
    "MiniCPM5": ("'<function name=\"' ~ name '<param name=\"' '</think>'", "minicpm5", "qwen3"),
    "Muse Glimmer": ("'<atem:function_calls>\\n<atem:invoke name=\"'", "muse_glimmer", "muse_glimmer"),
    "GigaChat3": ("role_sep='<|role_sep|>\\n', message_sep='<|message_sep|>'", "gigachat3", None),
    "Dots": ("<dots_function_call>", "dots", None),
    "LongCat": ("<longcat_tool_call>", "longcat", None),
    "Inkling": ("<|content_thinking|> <|content_invoke_tool_json|>", "inkling", "inkling"),
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
