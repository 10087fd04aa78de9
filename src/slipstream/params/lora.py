"""LoRARequest: names the LoRA adapter of a request."""

from __future__ import annotations

import msgspec

from slipstream.base.errors import InvalidAdapter

MAX_CHARS = 4096  # of a name or a path


class LoRARequest(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: a folder in PEFT's layout on the machine of the engine.

        llm.generate(prompt, lora_request=LoRARequest("sql", 1, "/adapters/sql"))

    Requests share an adapter if name, number and path are equal.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name, value in (("lora_name", self.lora_name), ("lora_path", self.lora_path)):
            if not isinstance(value, str) or not value:
                raise InvalidAdapter(f"{name} is {value!r}; give a text", param="lora_request")
            if len(value) > MAX_CHARS or "\0" in value or not _is_text(value):
                raise InvalidAdapter(
                    f"{name} has {len(value)} characters, or characters that no path has; give up to {MAX_CHARS} "
                    "valid ones",
                    param="lora_request",
                )
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**63:
            raise InvalidAdapter(f"lora_int_id is {number!r}; give a whole number from 1 up", param="lora_request")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True
