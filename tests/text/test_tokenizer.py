from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import AutoTokenizer

from child import child_env
from slipstream.base.errors import BadTokenizer, InvalidPrompt
from slipstream.text.guarded import Guarded, GuardedEncoder
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import CHATML, END_OF_TEXT, IM_END, IM_START, write_byte_tokenizer


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    value.update(changes)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def test_a_folder_gives_text_ids_and_roles(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    text = "<|im_start|>é\x00<|im_end|>"
    assert tokenizer.encode(text) == [IM_START, 0xC3, 0xA9, 0, IM_END]
    assert tokenizer.decode(tokenizer.encode(text)) == "é\x00"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode_batch(["a", "", "bc"]) == [[97], [], [98, 99]]
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (259, END_OF_TEXT, IM_END)
    assert tokenizer.special_ids == {END_OF_TEXT, IM_START, IM_END}
    assert tokenizer.is_special(IM_END) and not tokenizer.is_special(0)
    assert tokenizer.chat_template() == CHATML


def test_write_byte_tokenizer_returns_the_vocabulary_size(tmp_path: Path) -> None:
    assert write_byte_tokenizer(tmp_path / "new") == 259


def test_a_tokenizer_json_alone_or_beside_its_files(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny_folder / "tokenizer.json"
    assert Tokenizer.load(path).eos_token_id == IM_END
    lone = tmp_path_factory.mktemp("lone") / "bytes.json"
    lone.write_bytes(path.read_bytes())
    assert Tokenizer.load(lone).encode("a<|im_end|>") == [97, IM_END]
    assert Tokenizer.load(lone).eos_token_id is None


def test_truncation_and_padding_baked_into_the_file_are_off(tiny_folder: Path) -> None:
    path = tiny_folder / "tokenizer.json"
    backend = Backend.from_file(str(path))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(path))
    assert Tokenizer.load(tiny_folder).encode_batch(["abcdef", "a"]) == [list(b"abcdef"), [97]]


def test_the_post_processor_adds_bos_once(tiny_folder: Path) -> None:
    path = tiny_folder / "tokenizer.json"
    backend = Backend.from_file(str(path))
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", END_OF_TEXT)]
    )
    backend.save(str(path))
    tokenizer = Tokenizer.load(tiny_folder)
    assert tokenizer.encode("a") == [END_OF_TEXT, 97]
    assert tokenizer.encode("<|endoftext|>a", add_special_tokens=False) == [END_OF_TEXT, 97]


def test_the_post_processor_alone_decides_on_the_ends_of_a_text(tiny_folder: Path) -> None:
    edit(tiny_folder / "tokenizer_config.json", add_bos_token=True, add_eos_token=True)
    assert Tokenizer.load(tiny_folder).encode("a") == [97]  # as transformers 5 has it


def test_roles_may_be_objects_or_stand_in_the_special_tokens_map(tiny_folder: Path) -> None:
    edit(tiny_folder / "tokenizer_config.json", eos_token={"content": "<|im_start|>"}, bos_token=...)
    (tiny_folder / "special_tokens_map.json").write_text('{"bos_token": "<|im_end|>", "eos_token": "<|im_end|>"}')
    tokenizer = Tokenizer.load(tiny_folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (IM_END, IM_START)


def test_a_token_with_a_role_is_special_even_if_the_file_forgot(tiny_folder: Path) -> None:
    path = tiny_folder / "tokenizer.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    for token in value["added_tokens"]:
        token["special"] = token["id"] == IM_START
    path.write_text(json.dumps(value))
    tokenizer = Tokenizer.load(tiny_folder)
    assert tokenizer.is_special(IM_END) and tokenizer.encode("<|im_end|>") == [IM_END]
    assert tokenizer.decode([97, IM_END]) == "a"


def test_a_role_that_names_no_token_adds_none(tiny_folder: Path) -> None:
    edit(tiny_folder / "tokenizer_config.json", pad_token="<pad>", eos_token="<gone>")
    tokenizer = Tokenizer.load(tiny_folder)
    assert tokenizer.vocab_size == 259 and tokenizer.eos_token_id is None


def test_tokens_declared_in_the_config_are_added(tiny_folder: Path) -> None:
    declared = {"259": {"content": "<tool>", "special": False}, "260": {"content": "<hidden>", "special": True}}
    edit(tiny_folder / "tokenizer_config.json", added_tokens_decoder=declared)
    tokenizer = Tokenizer.load(tiny_folder)
    assert tokenizer.encode("<tool><hidden>") == [259, 260]
    assert tokenizer.decode([259, 260]) == "<tool>"
    assert tokenizer.vocab_size == 261


def test_chat_templates_are_found_in_each_of_their_places(tiny_folder: Path) -> None:
    config = tiny_folder / "tokenizer_config.json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    edit(config, chat_template=named)
    tokenizer = Tokenizer.load(tiny_folder)
    assert (tokenizer.chat_template(), tokenizer.chat_template(with_tools=True)) == ("plain", "with tools")
    (tiny_folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert Tokenizer.load(tiny_folder).chat_template(with_tools=True) == "from json"
    (tiny_folder / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.load(tiny_folder).chat_template() == "from jinja"


def test_further_templates_have_a_folder_of_their_own(tiny_folder: Path) -> None:
    """As transformers reads them: files count more than tokenizer_config.json, and all of them together."""

    def check(default: str, with_tools: str) -> None:
        ours, theirs = Tokenizer.load(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
        assert ours.chat_template() == theirs.get_chat_template() == default
        assert ours.chat_template(with_tools=True) == theirs.get_chat_template(tools=[{}]) == with_tools

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    edit(tiny_folder / "tokenizer_config.json", chat_template=named)
    check("plain", "with tools")
    (tiny_folder / "chat_template.jinja").write_text("from jinja")
    check("from jinja", "from jinja")
    folder = tiny_folder / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("tools of the folder")
    (folder / "rag.jinja").write_text("not asked for")
    (folder / "notes.txt").write_text("no template")
    check("from jinja", "tools of the folder")
    (tiny_folder / "chat_template.jinja").unlink()
    # transformers finds no default here and refuses to chat; the one of the config is better than none
    assert Tokenizer.load(tiny_folder).chat_template() == "plain"
    assert Tokenizer.load(tiny_folder).chat_template(with_tools=True) == "tools of the folder"
    (folder / "default.jinja").write_text("default of the folder")
    check("default of the folder", "tools of the folder")
    (tiny_folder / "chat_template.jinja").write_text("from jinja")
    check("default of the folder", "tools of the folder")
    (folder / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(BadTokenizer, match="tool_use.jinja cannot be read"):
        Tokenizer.load(tiny_folder)


def test_no_chat_template_is_none(tiny_folder: Path) -> None:
    edit(tiny_folder / "tokenizer_config.json", chat_template=...)
    assert Tokenizer.load(tiny_folder).chat_template() is None


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "New"}}'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}'),
        ("special_tokens_map.json", b"nonsense"),
        ("chat_template.json", b"\xff"),
    ],
)
def test_broken_files_are_named_with_the_alternative(tiny_folder: Path, name: str, content: bytes) -> None:
    (tiny_folder / name).write_bytes(content)
    with pytest.raises(BadTokenizer, match=f"{name}.*skip_tokenizer_init=True"):
        Tokenizer.load(tiny_folder)


def test_a_missing_tokenizer_names_the_alternative(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match="no tokenizer.json; .*skip_tokenizer_init=True and prompts as token ids"):
        Tokenizer.load(tmp_path)
    with pytest.raises(BadTokenizer, match="there is no tokenizer at"):
        Tokenizer.load(tmp_path / "absent")
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(BadTokenizer, match="tokenizer.model must be converted"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("text, words", [("\ud800", "surrogate"), (None, "NoneType"), (b"a", "bytes")])
def test_what_is_not_text_is_refused(tiny_folder: Path, text: Any, words: str) -> None:
    with pytest.raises(InvalidPrompt, match=words):
        Tokenizer.load(tiny_folder).encode(text)


def test_the_text_package_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, slipstream.text.chat_template, slipstream.text.detokenizer, slipstream.text.detokenizer\n"
        "import slipstream.checkpoint.gguf_info, slipstream.checkpoint.locate, slipstream.checkpoint.generation\n"
        "found = sorted({'torch', 'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules))\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], env=child_env(), capture_output=True)
    assert (run.stderr, run.returncode) == (b"", 0)


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_a_regex_of_the_file_that_backtracks_for_ever_fails_the_prompt(tiny_folder: Path, place: str) -> None:
    """The library panics at its limit of backtracking, with an exception that is no Exception."""
    pattern = {"pattern": {"Regex": "(a+a+)+b"}}
    split = {"type": "Split", "behavior": "Isolated", "invert": False} | pattern
    replace = {"type": "Replace", "content": "x"} | pattern
    edit(tiny_folder / "tokenizer.json", **{place: split if place == "pre_tokenizer" else replace})
    tokenizer = Tokenizer.load(tiny_folder)
    assert tokenizer.encode("b")
    with pytest.raises(InvalidPrompt, match="retry-limit"):
        tokenizer.encode("a" * 40)
    with pytest.raises(InvalidPrompt, match="retry-limit"):
        Guarded("a" * 40, [], GuardedEncoder(tokenizer.backend, {})).token_ids()
