"""An LLM that needs no model: it answers "echo: PROMPT" a few characters at a time, and notes what it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from slipstream.config.options import make_options
from slipstream.front.results import CompletionOutput, RequestOutput
from slipstream.params.sampling import SamplingParams

OnResult = Callable[[int, RequestOutput], None] | None


class FakeLLM:
    models = ("fake",)
    tokenizer: Any = None  # without a chat template

    def __init__(self, **options: Any) -> None:
        make_options(**options)
        self.options = options
        self.conversations: list[list[dict[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.prompts: list[Any] = []
        self.closed = False
        self.num_aborted = 0

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.25, top_k=7)

    def generate(
        self, prompts: list[Any], params: SamplingParams, use_tqdm: bool = True, on_result: OnResult = None
    ) -> None:
        self.prompts += prompts
        self._run([prompt.get("prompt") for prompt in prompts], params, on_result)

    def chat(
        self, conversations: list[Any], params: SamplingParams, use_tqdm: bool = True, on_result: OnResult = None
    ) -> None:
        self.conversations += conversations
        self._run([messages[-1]["content"] for messages in conversations], params, on_result)

    def _run(self, texts: list[str | None], params: SamplingParams, on_result: OnResult) -> None:
        self.params.append(params)
        for number in self.order(len(texts)):
            if on_result is not None:
                on_result(number, self._output(texts[number], params))

    def order(self, count: int) -> Iterator[int]:
        """The order in which prompts are done."""
        yield from range(count)

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        self.conversations.append(messages)
        self.params.append(params)
        whole = self._output(messages[-1]["content"], params)
        text = whole.outputs[0].text
        finished = False
        try:
            for stop in range(4, len(text) + 4, 4):
                self.between()
                whole.finished = finished = stop >= len(text)
                whole.outputs[0].text = text[:stop]
                yield whole
        finally:
            self.num_aborted += not finished

    def between(self) -> None:
        """Comes before each part of a streamed answer."""

    def close(self) -> None:
        self.closed = True

    def _output(self, prompt: str | None, params: SamplingParams) -> RequestOutput:
        texts = [f"echo: {prompt}" + "!" * sample for sample in range(params.n)]
        samples = [CompletionOutput(i, text, [1, 2, 3 + i], finish_reason="stop") for i, text in enumerate(texts)]
        return RequestOutput("request-0", prompt, [9, 9], None, samples, finished=True)
