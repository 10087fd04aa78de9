"""Code that `chat` and `generate` share: opening the model, and its sampling parameters."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.base.processes import loading
from slipstream.config.options import make_options
from slipstream.serve.cli.flags import check_paths, engine_options, sampling_changes

if TYPE_CHECKING:
    from slipstream.api.llm import LLM
    from slipstream.params.sampling import SamplingParams

INTERRUPTED = 130  # a shell's exit code for SIGINT


class OpenLLM(Protocol):
    """Creates an LLM from options."""

    def __call__(self, **options: Any) -> LLM: ...


def open_llm(**options: Any) -> LLM:
    check_paths(make_options(**options), look_up=True)
    with loading():
        from slipstream.api.llm import LLM  # imports torch, which --help and errors do not need

        return LLM(**options)


def open_with(args: argparse.Namespace, opener: OpenLLM) -> tuple[LLM, SamplingParams]:
    """Returns the model and the sampling parameters, which are checked before the model is loaded."""
    from slipstream.params.sampling import SamplingParams

    changes = sampling_changes(args)
    SamplingParams(**changes)
    llm = opener(**engine_options(args))
    try:
        return llm, llm.get_default_sampling_params().with_changes(**changes)
    except BaseException:
        llm.close()
        raise
