"""A scripted core at the other end of a front end's socket: records messages and sends what the test chooses."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from patience import PATIENCE
from slipstream.checkpoint.generation import GenerationDefaults
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.contracts.messages import LOGPROB, Abort, Output, Pooled, Submit, SubmitAll
from slipstream.contracts.request import FinishReason
from slipstream.engine.model_description import ModelDescription
from slipstream.front.async_engine import AsyncEngine
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.transport.frames import (
    AbortAll,
    AbortedAll,
    Control,
    Controlled,
    FromCore,
    Inspect,
    Inspected,
    ModelDescriptions,
    Ready,
    ResetPrefixCache,
    ToCore,
    frame,
    to_core_frames,
)
from slipstream.transport.sockets import SocketClient

TEXT = b"All is well. "


def facts(folder: Path, name: str = "tiny", **more: Any) -> ModelDescription:
    known = dict(
        name=name,
        tokenizer=str(folder),
        chat_template=None,
        defaults=GenerationDefaults(params={"temperature": 0.5}),
        max_model_len=64,
        max_positions=1024,
        vocab_size=304,
    )
    return ModelDescription(**(known | more))


EVERY_TASK = PoolingInfo(
    tasks=("embed", "classify", "token_embed", "token_classify", "sparse"), embed_size=8, token_size=8, num_labels=1
)
_SHAPES = {
    "embed": lambda count: (8,),
    "classify": lambda count: (1,),
    "token_embed": lambda count: (count, 8),
    "token_classify": lambda count: (count, 1),
    "sparse": lambda count: (304,),
}


class ScriptedCore(asyncio.Protocol):
    """With `answers` it answers every prompt with TEXT, one token per byte, or with a constant vector for pooling;
    without, the test answers by `say`."""

    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.submits: list[Submit] = []
        self.aborts: list[Abort] = []
        self.others: list[AbortAll | AbortedAll] = []  # messages between front ends
        self.num_resets = 0
        self.inspects: list[Inspect] = []
        self.inspector: Callable[[Inspect], Inspected] = lambda message: Inspected(message.call, b"")
        self.controls: list[Control] = []
        self.controller: Callable[[Control], Controlled] = lambda message: Controlled(message.call, False)
        self.frames = to_core_frames()
        self.changed = asyncio.Event()

    @classmethod
    async def open(
        cls, *models: ModelDescription, ready: bool = True, **script: Any
    ) -> tuple[AsyncEngine, ScriptedCore]:
        ours, theirs = socket.socketpair()
        _, core = await asyncio.get_running_loop().create_unix_connection(lambda: cls(**script), sock=theirs)
        engine = AsyncEngine(client=await SocketClient.connect(ours))
        core.say(ModelDescriptions(list(models), os.getpid()))
        if ready:
            core.say(Ready())
            await engine.until_ready()
        return engine, core

    def say(self, *messages: FromCore) -> None:
        self.transport.write(frame(messages))

    def token(self, submit: Submit, *ids: int, end: FinishReason | None = None, sample: int = 0) -> None:
        self.say(Output(submit.request_id, sample, list(ids), finish_reason=end))

    async def until(self, condition: Any) -> None:
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), PATIENCE)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        for message in self.frames.push(data):
            self.take(message)
        self.changed.set()

    def take(self, message: ToCore) -> None:
        if isinstance(message, Abort):
            self.aborts.append(message)
            return
        if isinstance(message, ResetPrefixCache):
            self.num_resets += 1
            self.say(message)
            return
        if isinstance(message, Inspect):
            self.inspects.append(message)
            self.say(self.inspector(message))
            return
        if isinstance(message, Control):
            self.controls.append(message)
            self.say(self.controller(message))
            return
        if isinstance(message, AbortAll | AbortedAll):
            self.others.append(message)
            return
        if isinstance(message, SubmitAll):
            for each in message.submits:
                self.take(each)
            return
        self.submits.append(message)
        if self.answers and isinstance(message.params, PoolingParams):
            numbers = np.full(_SHAPES[message.params.task](len(message.prompt_token_ids)), 0.5, np.float32)
            self.say(Output(message.request_id, 0, [], None, FinishReason.STOP, pooled=Pooled.of(numbers)))
        elif self.answers:
            num = message.params.max_tokens
            ids = [TEXT[i % len(TEXT)] for i in range(num if num is not None else len(TEXT))]
            of_prompt = _prompt_logprobs(message)
            for sample in range(message.params.n):
                outputs = [
                    Output(
                        message.request_id,
                        sample,
                        [token],
                        _logprobs(message.params, token),
                        FinishReason.LENGTH if place == len(ids) - 1 else None,
                        prompt_logprobs=None if sample or place else of_prompt,
                    )
                    for place, token in enumerate(ids)
                ]
                self.say(*outputs)


def _logprobs(params: SamplingParams, token: int) -> bytes | None:
    """Logprobs of a sampled token: the token is the most likely, then others by id, then requested ids with rank 0."""
    if params.num_logprobs is None:
        return None
    likeliest = (token, *range(params.num_logprobs + 1))[: params.num_logprobs]
    told = [(-0.5, token, 1), *((-0.5 - rank, other, rank + 1) for rank, other in enumerate(likeliest))]
    return np.array([*told, *((-9.0, given, 0) for given in params.requested_ids)], LOGPROB).tobytes()


def _prompt_logprobs(message: Submit) -> bytes | None:
    """Logprobs of the prompt tokens from the second on."""
    assert isinstance(message.params, SamplingParams)
    if (count := message.params.prompt_logprobs) is None:
        return None
    told = [
        (-0.25 - rank, token if rank == 0 else rank, rank + 1)
        for token in message.prompt_token_ids[1:]
        for rank in range(count + 1)
    ]
    return np.array(told, LOGPROB).tobytes()
