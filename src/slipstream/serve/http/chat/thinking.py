"""Turns the fields that control reasoning into variables of the model's chat template."""

from __future__ import annotations

from typing import Any

from slipstream.front.served import ServedModel
from slipstream.serve.http.errors import bad_request
from slipstream.text.chat_template import reads_variable

_SWITCHES = ("enable_thinking", "thinking")  # names of the switch in templates
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def thinking_variables(served: ServedModel, enable_thinking: bool | None, effort: str | None) -> dict[str, Any]:
    """The variables of the template for these fields. Raises for a field that the template does not read."""
    template = None if served.tokenizer is None else served.tokenizer.chat_template()
    switch = next((name for name in _SWITCHES if template is not None and reads_variable(template, name)), None)
    variables: dict[str, Any] = {}
    if effort is not None:
        if effort not in _EFFORTS:
            raise bad_request(f"reasoning_effort is {effort!r:.100}; give {', '.join(_EFFORTS)}", "reasoning_effort")
        if effort == "none" and switch is not None and enable_thinking is None:
            enable_thinking = False
        elif template is None or not reads_variable(template, "reasoning_effort"):
            raise _unread("reasoning_effort", served, switch)
        else:
            variables["reasoning_effort"] = effort
    if enable_thinking is not None:
        if switch is None:
            raise _unread("enable_thinking", served, switch)
        variables[switch] = enable_thinking
    return variables


def _unread(name: str, served: ServedModel, switch: str | None) -> Exception:
    hint = "use enable_thinking" if name == "reasoning_effort" and switch else "remove it"
    fact = f"{name} has no effect: the chat template of {served.description.name} does not read it"
    return bad_request(f"{fact}; {hint}", name, "unsupported_parameter")
