"""What a model was trained to find around a text: a prompt before it, a role, or another text beside it."""

from __future__ import annotations

from slipstream.config.pooling_info import PoolingInfo, Role
from slipstream.errors import InvalidParams, InvalidPrompt
from slipstream.text.control_tokens import ControlTokens

PLAIN = Role()


def prefix_of(pooling: PoolingInfo, model_name: str, prompt_name: str | None, prompt: str | None) -> str:
    """What stands before a text: given itself, by its name, or the model's own."""
    if prompt is not None:
        if prompt_name is not None:
            raise InvalidParams("prompt and prompt_name are both given; leave one out")
        if not isinstance(prompt, str):
            raise InvalidParams(f"prompt is {prompt!r}; give the text to put before each, or a prompt_name")
        return prompt
    name = pooling.default_prompt_name if prompt_name is None else prompt_name
    if name is None or (name in ("query", "document") and pooling.late and name not in pooling.prompts):
        return ""
    if name not in pooling.prompts:
        known = ", ".join(pooling.prompts) or "none"
        raise InvalidParams(f"{model_name} has no prompt {name!r}; it has {known}", param="prompt_name")
    return pooling.prompts[name]


def role_of(pooling: PoolingInfo, prompt_name: str | None) -> Role:
    """What a text is to late interaction, by the name of its prompt."""
    if not pooling.late or prompt_name not in ("query", "document"):
        return PLAIN
    return pooling.query if prompt_name == "query" else pooling.document


def pair_words(
    pooling: PoolingInfo, model_name: str, prompt_name: str | None, instruction: str | None
) -> tuple[str, str | None]:
    """What a prompt's name means for a pair: what stands before its first text, and the instruction. A model that is
    told what to do has its prompts for instructions."""
    if pooling.pair_template is None or prompt_name is None:
        before = "" if pooling.pair_template is not None else prefix_of(pooling, model_name, prompt_name, None)
        return before, instruction
    if instruction is not None:
        raise InvalidParams("instruction and prompt_name are both given; leave one out", param="prompt_name")
    return "", prefix_of(pooling, model_name, prompt_name, None)


def join_pair(
    pooling: PoolingInfo,
    model_name: str,
    query: str,
    document: str,
    instruction: str | None,
    controls: ControlTokens | None,
) -> str | tuple[str, str]:
    """Two texts as one prompt, in the way the model was trained. With `controls`, control tokens that the texts spell
    are encoded as text."""
    for text in (query, document):
        if not isinstance(text, str):
            raise InvalidPrompt(f"score compares texts; {type(text).__name__} is none")
    template = pooling.pair_template
    if template is None:
        if instruction is not None:
            raise InvalidParams(f"{model_name} takes no instruction; leave it out", param="instruction")
        return query, document
    said = pooling.instruction if instruction is None else instruction
    # once through, so that braces in a text mean nothing
    parts = {"{instruction}": said, "{query}": query, "{document}": document}
    if controls is not None:
        parts = {name: controls.mask(part) for name, part in parts.items()}
    text, rest = "", template
    while rest:
        places = [(rest.find(name), name) for name in parts if name in rest]
        place, name = min(places, default=(len(rest), ""))
        text += rest[:place] + (parts[name] if name else "")
        rest = rest[place + len(name) :]
    return text if controls is None else controls.unmask(text)
