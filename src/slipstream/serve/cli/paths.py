"""Paths in options that lead nowhere, found before anything heavy is loaded."""

from __future__ import annotations

from pathlib import Path

from slipstream.config.locate import check_model, locate
from slipstream.config.options import Options
from slipstream.errors import BadTokenizer


def check_paths(options: Options, *, look_up: bool = False) -> None:
    """Raises for a model, a tokenizer or a chat template that is not there.

    A name of the hub is believed to be one, unless it is to be looked up, which may take as long as a download.
    """
    if look_up:
        locate(options.model, options.revision, options.task)
    else:
        check_model(options.model, options.task)
    if options.tokenizer is not None and not Path(options.tokenizer).expanduser().exists():
        raise BadTokenizer(f"there is no tokenizer at {options.tokenizer}; give a folder or a tokenizer.json")
    if options.chat_template is not None:
        from slipstream.text.chat import load_chat_template  # brings jinja2

        load_chat_template(options.chat_template)
