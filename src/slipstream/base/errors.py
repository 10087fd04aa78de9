"""Every exception that users may get.

    SlipstreamError
    ├── UserError                 a request or an option is wrong; other requests are not affected
    │   ├── InvalidParams         a sampling parameter out of its range
    │   ├── InvalidPrompt         empty, or a token the model does not have
    │   ├── PromptTooLong         more tokens than the model length
    │   ├── InvalidImage          cannot be fetched or read, or has a size or shape that is not accepted
    │   ├── RequestTooLarge       would never fit the KV cache or the queue
    │   ├── InvalidAdapter        a LoRA adapter that cannot be loaded
    │   └── InvalidOption         an engine option that does not exist or has an unsupported value
    ├── ModelError                a model that cannot be loaded
    │   ├── ModelNotFound         no such folder, file or name
    │   ├── UnsupportedModel      an architecture, or a feature of one, that is not supported
    │   ├── BadCheckpoint         a broken file; tensors missing, unknown or of the wrong shape
    │   └── BadTokenizer          tokenizer or chat template missing or broken
    ├── NotEnoughMemory           the machine has less memory than the configuration needs
    ├── QueueFull                 too many requests are waiting; retry later
    ├── EngineAsleep              the engine sleeps, or has no weights; wake it up
    ├── EngineClosed              the engine was shut down
    ├── ReplicaLost               the replica that ran a request failed after it had sent output
    └── EngineDead                the engine failed; the cause is chained

A message has the fact, the limit and the alternative. Bugs of the engine are asserts, not these exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_MESSAGE = 1000  # characters of an error about a model


class SlipstreamError(Exception):
    """Base class of all exceptions that Slipstream raises on purpose."""

    def of_prompt(self, index: int, total: int) -> SlipstreamError:
        """The same error, with the number of the prompt it is about in its message."""
        return self if total == 1 else type(self)(f"prompt {index + 1} of {total}: {self}")


class UserError(SlipstreamError, ValueError):
    """A request or an option is wrong. `param` names the parameter, if the error is about one; `code` is the kind of
    error for programs, of an HTTP answer."""

    code: str | None = None

    def __init__(self, message: str = "", *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.code

    def of_prompt(self, index: int, total: int) -> SlipstreamError:
        if total == 1:
            return self
        return type(self)(f"prompt {index + 1} of {total}: {self}", param=self.param, code=self.code)


class InvalidParams(UserError):
    """A sampling or pooling parameter is unknown or out of its range."""


class InvalidPrompt(UserError):
    """The prompt is empty, of a wrong type, or has a token that the model does not have."""


class PromptTooLong(UserError):
    """The prompt has more tokens than the model length."""

    code = "context_length_exceeded"


class InvalidImage(UserError):
    """An image or a video cannot be fetched or read, or has a size or shape that is not accepted."""


class RequestTooLarge(UserError):
    """The request would never fit the KV cache or the queue."""


class InvalidAdapter(UserError):
    """A LoRA adapter is missing, broken, unsupported, or does not fit the model."""


class InvalidOption(UserError):
    """An engine option does not exist or has an unsupported value."""


class ModelError(SlipstreamError):
    """The model cannot be loaded."""


@contextmanager
def naming_model(path: str | Path) -> Iterator[None]:
    """A ModelError that is raised inside names this file or folder, and has a length that can be read: values of a
    damaged file may be of any length."""
    try:
        yield
    except ModelError as error:
        message = str(error)
        if str(path) not in message and not (Path(path).suffix and Path(path).name in message):
            message = f"{path}: {message}"
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE // 2]} ... {message[-_MAX_MESSAGE // 2 :]}"
        raise type(error)(message) from error.__cause__


class ModelNotFound(ModelError):
    """There is no such folder, file or name."""


class UnsupportedModel(ModelError):
    """The architecture, or a feature of it, is not supported."""


class BadCheckpoint(ModelError):
    """A file is broken, or tensors are missing, unknown or of the wrong shape."""


class BadTokenizer(ModelError):
    """The tokenizer or chat template is missing or broken."""


class NotEnoughMemory(SlipstreamError):
    """The machine has less memory than the configuration needs."""


class QueueFull(SlipstreamError):
    """Too many requests are waiting; retry later."""

    def of_prompt(self, index: int, total: int) -> SlipstreamError:
        """Unchanged: the error is about all prompts."""
        return self


class EngineAsleep(SlipstreamError):
    """The engine sleeps, or some of its weights were dropped or half exchanged, and not loaded again."""

    def of_prompt(self, index: int, total: int) -> SlipstreamError:
        """Unchanged: the error is about all prompts."""
        return self


class EngineClosed(SlipstreamError):
    """The engine was closed."""


class ReplicaLost(SlipstreamError):
    """The replica that ran the request failed, and the request cannot be run again on another one."""


class EngineDead(SlipstreamError):
    """The engine failed; the cause is chained."""
