"""LLM: generation for scripts. The core and its caller share one thread; nothing runs between calls."""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from slipstream.config.options import make_options
from slipstream.device.device import Device
from slipstream.engine.build import build
from slipstream.engine.inputs import Message, Prompt
from slipstream.engine.interrupts import held_back
from slipstream.engine.outputs import OutputProcessor, Track
from slipstream.engine.results import RequestOutput
from slipstream.errors import EngineClosed, InvalidParams, InvalidPrompt, QueueFull, UserError
from slipstream.messages import Abort, Submit
from slipstream.params import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model to call from Python.

        with LLM() as llm:
            print(llm.generate("Once upon a time")[0].outputs[0].text)

    With no arguments it runs the embedded SmolLM2. The options are those of `config/options.py`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        use_tqdm_on_load: bool = True,
        _device: Device | None = None,
        **options: Any,
    ) -> None:
        built = build(
            make_options(model=None if model is None else str(model), **options),
            progress=use_tqdm_on_load,
            device=_device,
        )
        self.config = built.config
        self.core = built.core
        self.inputs = built.inputs
        self.tokenizer = built.tokenizer
        self._outputs = OutputProcessor(built.tokenizer)
        self._numbers = itertools.count()
        self._closed = False
        self._free = weakref.finalize(self, built.core.close)  # also when nobody closes it

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, batched as the machine allows. Results come in the order of the prompts.

        `priority` and `cache_salt`, one for all or one each, count more than those of the parameters.
        """
        batch = _as_batch(prompts)
        return self._run(batch, sampling_params, use_tqdm, priority, cache_salt, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several."""
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if many else [messages]
        texts = [
            self.inputs.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        # the template has put the special tokens where it wants them
        return self._run(texts, sampling_params, use_tqdm, None, None, add_special_tokens=False)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """One prompt, its results as they grow. Leaving the loop early aborts it."""
        return self._stream(prompt, sampling_params, add_special_tokens=True)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **template: Any
    ) -> Iterator[RequestOutput]:
        text = self.inputs.render_chat(messages, **template)
        return self._stream(text, sampling_params, add_special_tokens=False)

    def default_sampling_params(self) -> SamplingParams:
        return self.inputs.default_params()

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def close(self) -> None:
        """Free the model, the cache and the device's thread."""
        if not self._closed:
            self._closed = True
            self._free()
            del self.core

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        use_tqdm: bool,
        priority: int | Sequence[int] | None,
        cache_salt: str | Sequence[str] | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        self._check_open()
        params = _spread("sampling_params", sampling_params, len(prompts))
        priorities = _spread("priority", priority, len(prompts))
        salts = _spread("cache_salt", cache_salt, len(prompts))
        # every prompt is checked before any runs
        submits: list[tuple[Submit, str | None]] = []
        for prompt, p, rank, salt in zip(prompts, params, priorities, salts, strict=True):
            name = f"request-{next(self._numbers)}"
            try:
                submit = self.inputs.submit(
                    name, prompt, p, priority=rank, cache_salt=salt, add_special_tokens=add_special_tokens
                )
            except UserError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {len(submits) + 1} of {len(prompts)}: {error}") from None
            submits.append(submit)
        tracks: list[Track] = []
        waiting = iter(submits)
        held = next(waiting, None)
        try:
            with _progress(len(prompts), use_tqdm) as advance:
                while held is not None or self.core.has_work():
                    while held is not None:
                        message, text = held
                        try:
                            self.core.submit(message)
                        except QueueFull:
                            if not self.core.has_work():
                                raise
                            break  # room comes as others finish
                        tracks.append(self._outputs.open(message, text, stream=False))
                        held = next(waiting, None)
                    for track in self._step():
                        if track.finished:
                            advance(track)
        except BaseException:
            self._give_up(tracks)
            raise
        return [track.result() for track in tracks]

    def _stream(
        self, prompt: Prompt, params: SamplingParams | None, *, add_special_tokens: bool
    ) -> Iterator[RequestOutput]:
        self._check_open()
        message, text = self.inputs.submit(
            f"request-{next(self._numbers)}", prompt, params, add_special_tokens=add_special_tokens
        )
        self.core.submit(message)
        track = self._outputs.open(message, text, stream=True)
        try:
            shown = 0
            while True:
                # others may step the engine too, so what is new is looked for before each step
                if track.num_tokens > shown or track.finished:
                    shown, finished = track.num_tokens, track.finished
                    yield track.result()
                    if finished:
                        return
                else:
                    self._step()
        finally:
            self._give_up([track])

    def _step(self) -> list[Track]:
        self._check_open()
        with held_back():
            outputs = self.core.step()
        moved, aborts = self._outputs.process(outputs)
        for abort in aborts:
            self.core.abort(abort)
        return moved

    def _give_up(self, tracks: list[Track]) -> None:
        for track in tracks:
            if not track.finished and not self._closed:
                self.core.abort(Abort(track.id))
                self._outputs.drop(track.id)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("this LLM was closed; make a new one")


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt, or a list of them: a list of whole numbers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidPrompt(f"prompts is {type(prompts).__name__}; give a string, token ids, or a list of prompts")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _spread(name: str, value: Any, count: int) -> Sequence[Any]:
    """One value for all, or one each."""
    if isinstance(value, list | tuple):
        if len(value) != count:
            raise InvalidParams(f"there are {count} prompts and {len(value)} {name}; give one for all or one each")
        return value
    return [value] * count


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[Track], None]]:
    """A bar that counts finished prompts and tokens a second; silent when not wanted or not at a terminal."""
    if not shown or total == 0 or not sys.stderr.isatty():
        yield lambda track: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, rate="")
        start, num_tokens = time.monotonic(), 0

        def advance(track: Track) -> None:
            nonlocal num_tokens
            num_tokens += sum(len(sample.token_ids) for sample in track.samples)
            bar.update(task, advance=1, rate=f"{num_tokens / (time.monotonic() - start):.0f} tok/s")

        yield advance
