import json
from types import SimpleNamespace

import pytest

from serve.fake_llm import FakeLLM
from slipstream.serve.cli.generate import parse_prompts


def test_prompts_as_arguments_come_back_in_order(terminal):
    code, out, err = terminal.run("generate", "one", "two", "--max-tokens", "5", "--model", "m")
    assert (code, out) == (0, "echo: one\n\necho: two\n")
    assert err.startswith("2 of 2 prompts are done: 4 prompt and 6 generated tokens in ") and err.endswith(" tok/s\n")
    assert terminal.llm.prompts == [{"prompt": "one"}, {"prompt": "two"}]
    (params,) = terminal.llm.params  # one call: they run batched
    assert (params.max_tokens, params.temperature) == (5, 0.25)
    assert terminal.llm.options == {"model": "m"} and terminal.llm.closed


class Backwards(FakeLLM):
    """Prompts are done in the reverse order, all but the first, in which the user presses Ctrl-C."""

    def order(self, count):
        yield from reversed(range(1, count))
        self.seen = self.capsys.readouterr().out
        raise KeyboardInterrupt


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_interrupt_leaves_what_is_done_and_says_how_much(terminal, flags):
    terminal.kind, Backwards.capsys = Backwards, terminal.capsys
    code, out, err = terminal.run("generate", "one", "two", "three", *flags)
    assert code == 130 and "interrupted: 2 of 3 prompts are done: 4 prompt and 6 generated tokens" in err
    assert terminal.llm.closed
    if flags:  # written at once, with the prompts' numbers
        assert not out and [json.loads(line)["index"] for line in terminal.llm.seen.splitlines()] == [2, 1]
    else:  # in the order of the prompts, so these two wait for the first
        assert not terminal.llm.seen and out == "[prompt 2] echo: two\n\n[prompt 3] echo: three\n"


class InTurn(FakeLLM):
    def order(self, count):
        for number in (1, 0, 2):
            self.seen = getattr(self, "seen", []) + [self.capsys.readouterr().out]
            yield number


def test_texts_are_printed_as_soon_as_all_before_them_are_done(terminal):
    terminal.kind, InTurn.capsys = InTurn, terminal.capsys
    assert terminal.run("generate", "a", "b", "c")[1] == "\necho: c\n"
    assert terminal.llm.seen == ["", "", "echo: a\n\necho: b\n"]


@pytest.mark.parametrize(
    ("argv", "template", "stdin", "is_chat"),
    [
        (["hi"], "t", "", True),
        (["hi"], None, "", False),
        (["hi", "--no-chat"], "t", "", False),
        (["hi", "--chat"], None, "", True),  # the model says that it has none
        (["hi", "--system", "s"], None, "", True),
        ([], "t", '{"prompt_token_ids": [1]}', False),
    ],
)
def test_the_chat_template_is_used_where_there_is_one(terminal, argv, template, stdin, is_chat):
    class Templated(FakeLLM):
        tokenizer = SimpleNamespace(chat_template=lambda: template)

    terminal.kind = Templated
    assert terminal.run("generate", *argv, stdin=stdin)[0] == 0
    assert bool(terminal.llm.conversations) == is_chat != bool(terminal.llm.prompts)


def test_json_lines_have_all_fields_of_each_text(terminal):
    _, out, _ = terminal.run("generate", "naïve", "b", "--json", "--n", "2")
    records = [json.loads(line) for line in out.splitlines()]
    assert [(r["index"], r["sample"], r["text"]) for r in records] == [
        (0, 0, "echo: naïve"),
        (0, 1, "echo: naïve!"),
        (1, 0, "echo: b"),
        (1, 1, "echo: b!"),
    ]
    assert records[0] == {
        "index": 0,
        "sample": 0,
        "prompt": "naïve",
        "text": "echo: naïve",
        "token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "stop_reason": None,
        "num_prompt_tokens": 2,
        "num_cached_tokens": 0,
    }
    assert "naïve" in out  # written as it is, not escaped


def test_a_file_holds_one_prompt_a_line(terminal, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\n  second\r\n")
    terminal.run("generate", "--file", str(path))
    assert terminal.llm.prompts == [{"prompt": "first"}, {"prompt": "  second"}]


def test_a_file_may_hold_json_lines(terminal, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "two\\nlines"}\n{"prompt_token_ids": [3, 4]}\n')
    _, out, _ = terminal.run("generate", "--file", str(path), "--json")
    assert terminal.llm.prompts == [{"prompt": "two\nlines"}, {"prompt_token_ids": [3, 4]}]
    assert json.loads(out.splitlines()[1])["prompt"] is None


@pytest.mark.parametrize("text", ['{"prompt": "a"}\n{"prompt": "b"}\n', "a\nb\n"])
def test_a_byte_order_mark_is_no_part_of_a_file(terminal, tmp_path, text):
    path = tmp_path / "prompts"
    path.write_text(text, encoding="utf-8-sig")
    terminal.run("generate", "--file", str(path))
    assert terminal.llm.prompts == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize("argv", [["generate"], ["generate", "--file", "-"]])
def test_standard_input_is_read_like_a_file(terminal, argv):
    assert terminal.run(*argv, stdin="a\nb\n")[1] == "echo: a\n\necho: b\n"


def test_chat_puts_prompts_through_the_template(terminal):
    _, out, _ = terminal.run("generate", "hi", "--chat", "--system", "be brief", "--json")
    assert terminal.llm.conversations == [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    ]
    assert json.loads(out)["prompt"] == "hi"


def test_a_first_line_that_only_looks_like_json_is_text():
    assert parse_prompts("{name} said\n3\n", "f") == ["{name} said", "3"]


@pytest.mark.parametrize("line", ["plain", '{"prompt": 3}', '{"words": "x"}', '{"prompt_token_ids": [1, "2"]}', "[]"])
def test_a_json_line_that_is_no_prompt_is_named(terminal, line):
    code, _, err = terminal.run("generate", stdin='{"prompt": "fine"}\n\n' + line)
    assert code == 2 and terminal.llm is None
    assert err.startswith("slipstream: standard input line 3 is not a JSON object")


@pytest.mark.parametrize(
    ("argv", "stdin", "tty", "message"),
    [
        (["generate"], "", True, "there is no prompt"),
        (["generate"], "\n\n", False, "there is no prompt"),
        (["generate", "a", "--file", "b"], "", True, "remove one of them"),
        (["generate", "--file", "no/such/file"], "", True, "cannot read prompts from no/such/file: No such file"),
        (["generate", "a", "--system", "s", "--no-chat"], "", True, "--system is for the chat template"),
        (["generate", "--chat"], '{"prompt_token_ids": [1]}', False, "a chat template needs text"),
        (
            ["generate"],
            '{"prompt": "a", "id": 3}\n{"prompt": "b", "max_tokens": 3}',
            False,
            "line 2 has --max-tokens: ",
        ),
    ],
)
def test_a_mistake_is_named_before_the_model_is_loaded(terminal, argv, stdin, tty, message):
    code, out, err = terminal.run(*argv, stdin=stdin, tty=tty)
    assert (code, out) == (2, "") and terminal.llm is None
    assert message in err and err.count("\n") == 1


def test_a_file_that_is_not_text_is_named(terminal, tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in terminal.run("generate", "--file", str(path))[2]


def test_the_shape_of_the_texts(terminal, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array"}')
    for flags, name, value in (
        (["--json-schema", str(schema)], "json", '{"type": "array"}'),
        (["--regex", "a+"], "regex", "a+"),
        (["--choice", "a", "--choice", "b"], "choice", ("a", "b")),
        (["--json-object"], "json_object", True),
    ):
        assert terminal.run("generate", "x", *flags)[0] == 0
        assert getattr(terminal.llm.params[-1].structured_outputs, name) == value
    schema.write_text("{")
    code, _, err = terminal.run("generate", "x", "--json-schema", str(schema))
    assert code and "not JSON" in err
    code, _, err = terminal.run("generate", "x", "--json-schema", str(tmp_path / "none.json"))
    assert code and "cannot read a schema" in err
