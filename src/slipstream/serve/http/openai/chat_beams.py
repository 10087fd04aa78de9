"""Beam search of POST /v1/chat/completions: each beam is parsed as a sample is, into content, reasoning and calls."""

from __future__ import annotations

from slipstream.params.sampling import SamplingParams
from slipstream.serve.http.chat.chat_run import ChatAnswer, ChatRun
from slipstream.serve.http.chat.conversation import ChatConversation
from slipstream.serve.http.openai.beam import beam_params, beam_samples, beam_usage, search_beams
from slipstream.serve.http.openai.chat_types import REFUSED, ChatRequest
from slipstream.serve.http.openai.generation import Usage, check_room
from slipstream.serve.http.request import Request

FIELDS = {
    "messages", "max_completion_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "allow_control_tokens", "tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "reasoning_effort",
    "enable_thinking", *REFUSED,
}  # fmt: skip
"""Fields of chat that beam search has, besides those of both routes."""


async def search_chat(
    request: Request, body: ChatRequest, conversation: ChatConversation
) -> tuple[list[ChatAnswer], list[int], Usage]:
    """The answers, the best first, the token ids of the prompt, and the usage."""
    run, served = ChatRun(request, conversation), conversation.model
    ((message, _),) = await request.state.encode(1, conversation.num_chars, run.prepare, request.caller)
    check_room(request, served.description.name, message, conversation.max_tokens)
    prompt, prepared = message.prompt_token_ids, message.params
    assert isinstance(prepared, SamplingParams)
    room = served.description.max_model_len - len(prompt)
    limit = room if conversation.params.max_tokens is None else min(room, conversation.params.max_tokens)
    params = beam_params(request, body, limit, prepared.structured_outputs)
    (search,) = await search_beams(request, body, served, [prompt], params)
    answers = [run.answer(sample) for sample in beam_samples(search, prepared, served)]
    return answers, prompt, beam_usage([search])
