"""Every exception a user can meet.

    SlipstreamError
    ├── UserError                 a request or an option is wrong; nobody else is harmed
    │   ├── InvalidParams         a sampling parameter out of its range
    │   ├── InvalidPrompt         empty, or a token the model does not have
    │   ├── PromptTooLong         more tokens than the model length
    │   ├── RequestTooLarge       could never fit the cache or the queue, however long it waited
    │   └── InvalidOption         an engine option that does not exist or cannot be honoured
    ├── ModelError                a model that cannot be loaded
    │   ├── ModelNotFound         no such folder, file or name
    │   ├── UnsupportedModel      an architecture or a feature of it that we do not run
    │   ├── BadCheckpoint         a file that is broken, or tensors missing, unknown or misshapen
    │   └── BadTokenizer          tokenizer or chat template missing or broken
    ├── NotEnoughMemory           the machine cannot hold what was asked for
    ├── QueueFull                 too many requests are waiting; try again later
    ├── EngineClosed              the engine was shut down
    └── EngineDead                the device half failed; the cause is chained

A message says the fact, the limit and the way out. Our own mistakes are asserts, not these.
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """The root: catching it catches all that Slipstream raises on purpose."""

    def of_prompt(self, place: int, total: int) -> SlipstreamError:
        """The same, named by the place of the prompt that it is about."""
        return self if total == 1 else type(self)(f"prompt {place + 1} of {total}: {self}")


class UserError(SlipstreamError, ValueError):
    """The caller asked for something that cannot be. `param`: the parameter it is about, where it is about one."""

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def of_prompt(self, place: int, total: int) -> SlipstreamError:
        return self if total == 1 else type(self)(f"prompt {place + 1} of {total}: {self}", param=self.param)


class InvalidParams(UserError):
    pass


class InvalidPrompt(UserError):
    pass


class PromptTooLong(UserError):
    pass


class RequestTooLarge(UserError):
    pass


class InvalidOption(UserError):
    pass


class ModelError(SlipstreamError):
    """The model cannot be loaded as it stands."""


class ModelNotFound(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class BadCheckpoint(ModelError):
    pass


class BadTokenizer(ModelError):
    pass


class NotEnoughMemory(SlipstreamError):
    pass


class QueueFull(SlipstreamError):
    def of_prompt(self, place: int, total: int) -> SlipstreamError:
        """It is about all of them."""
        return self


class EngineClosed(SlipstreamError):
    pass


class EngineDead(SlipstreamError):
    pass
