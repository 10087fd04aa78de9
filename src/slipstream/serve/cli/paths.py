"""Checks the paths in options before torch is imported."""

from __future__ import annotations

from pathlib import Path

from slipstream.base.errors import BadTokenizer
from slipstream.checkpoint.locate import check_model, locate
from slipstream.config.adapter_config import check_lora_modules
from slipstream.config.options import Options


def check_paths(options: Options, *, look_up: bool = False) -> None:
    """Raises for a model, a tokenizer, a chat template or an adapter that does not exist.

    A hub name is not checked unless `look_up`, which may download the model.
    """
    if look_up:
        locate(options.model, options.revision, options.task, options.download_dir)
    else:
        check_model(options.model, options.task)
    if options.tokenizer is not None and not Path(options.tokenizer).expanduser().exists():
        raise BadTokenizer(f"there is no tokenizer at {options.tokenizer}; give a folder or a tokenizer.json")
    if options.chat_template is not None:
        from slipstream.text.chat_template import load_chat_template  # imports jinja2

        load_chat_template(options.chat_template)
    check_lora_modules(options)
