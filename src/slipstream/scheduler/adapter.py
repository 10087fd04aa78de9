"""Adapter: the state of one LoRA adapter in the scheduler."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from slipstream.lora_request import LoRARequest


class Adapter:
    """An adapter that some request uses, or that is still in host memory."""

    __slots__ = ("lora", "buffer", "slot", "digest", "is_read", "job", "num_live", "num_running", "waiting")

    def __init__(self, lora: LoRARequest) -> None:
        self.lora = lora
        self.buffer = -1  # in host memory
        self.slot = -1  # on the device
        self.digest = b""
        self.is_read = False
        self.job: Future[bytes] | None = None  # reads it
        self.num_live = 0  # requests that have not ended
        self.num_running = 0  # requests that the device may still compute with it
        self.waiting: dict[Any, None] = {}  # requests that wait until it is read, or for a slot
