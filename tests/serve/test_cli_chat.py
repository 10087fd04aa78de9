import json
import re
import signal

import pytest

from serve.fake_llm import FakeLLM
from slipstream.base.errors import PromptTooLong


def test_a_prompt_is_answered_and_the_model_closed(terminal):
    code, out, err = terminal.run("chat", "hello there", "--model", "m", "--page-size", "8")
    assert (code, out, err) == (0, "echo: hello there\n", "")
    assert terminal.llm.options == {"model": "m", "page_size": 8}
    assert terminal.llm.closed


def test_the_model_supplies_sampling_defaults_and_flags_change_them(terminal):
    terminal.run("chat", "hi", "--top-p", "0.5", "--stop", "x")
    (params,) = terminal.llm.params
    assert (params.temperature, params.top_k, params.top_p, params.stop) == (0.25, 7, 0.5, ("x",))
    assert params.max_tokens == 1024


def test_the_system_message_comes_first(terminal):
    terminal.run("chat", "hi", "--system", "be brief")
    assert terminal.llm.conversations == [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    ]


def test_a_pipe_is_the_prompt(terminal):
    assert terminal.run("chat", stdin="two\nlines\n")[1] == "echo: two\nlines\n\n"


def test_a_given_prompt_leaves_the_pipe_alone(terminal):
    assert terminal.run("chat", "hi", stdin="not this")[1] == "echo: hi\n"


@pytest.mark.parametrize("argv", [["chat"], ["chat", "  "]])
def test_an_empty_prompt_is_refused_before_loading(terminal, argv):
    code, out, err = terminal.run(*argv, stdin=" \n")
    assert (code, out) == (2, "") and "the prompt is empty" in err
    assert terminal.llm is None


def test_text_is_written_as_it_comes(terminal):
    seen = []

    class Watched(FakeLLM):
        def between(self):
            seen.append(terminal.capsys.readouterr().out)

    terminal.kind = Watched
    terminal.run("chat", "abcdef")
    assert seen == ["", "echo", ": ab"]


def test_an_answer_cut_off_says_so_on_stderr(terminal):
    class Cut(FakeLLM):
        def _output(self, prompt, params):
            output = super()._output(prompt, params)
            output.outputs[0].finish_reason = "length"
            return output

    terminal.kind = Cut
    code, out, err = terminal.run("chat", "hi", "--max-tokens", "5")
    assert (code, out) == (0, "echo: hi\n")
    assert err == "[cut off at the length limit; --max-tokens is 5]\n"


def test_a_conversation_remembers_what_was_said(terminal):
    code, out, _ = terminal.run("chat", "--system", "s", stdin="one\n\ntwo\n", tty=True)
    assert code == 0 and terminal.llm.closed
    assert out == "> echo: one\n> > echo: two\n> \n"
    assert terminal.llm.conversations[-1] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "echo: one"},
        {"role": "user", "content": "two"},
    ]


def test_reset_forgets_but_keeps_the_system_message(terminal):
    terminal.run("chat", "--system", "s", stdin="one\n/reset\ntwo\n", tty=True)
    assert terminal.llm.conversations[-1] == [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]


def test_the_model_and_the_speed_are_shown(terminal):
    _, _, err = terminal.run("chat", stdin="one\n", tty=True)
    first, speed = err.splitlines()
    assert first == "fake. Type a message; /help lists the commands."
    assert re.fullmatch(r"\[3 tokens, \d+ tok/s, the first after \d+\.\d\d s\]", speed)


def test_a_message_may_have_several_lines(terminal):
    stdin = '"""one\n/exit\n\ntwo"""\nthree\\\nfour\n"""five"""\n'
    _, out, _ = terminal.run("chat", stdin=stdin, tty=True)
    said = [each["content"] for each in terminal.llm.conversations[-1] if each["role"] == "user"]
    assert said == ["one\n/exit\n\ntwo", "three\nfour", "five"] and out.startswith("> ... ... ... echo: one\n/exit")


def test_set_changes_parameters_and_the_system_message(terminal):
    lines = "/set temperature 0.5\n/set system be kind\n/set stop x y\nhi\n/set\n/set system\nhi\n"
    _, out, _ = terminal.run("chat", "--top-p", "0.9", stdin=lines, tty=True)
    first, second = terminal.llm.conversations
    assert first[0] == {"role": "system", "content": "be kind"} and second[0]["role"] == "user"
    params = terminal.llm.params[0]
    assert (params.temperature, params.top_p, params.stop, params.top_k) == (0.5, 0.9, ("x y",), 7)
    assert "temperature             0.5\n" in out and "system                  be kind\n" in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temprature 1", "there is no parameter temprature; give temperature"),
        ("/set temperature hot", "it takes a number"),
        ("/set temperature -3", "temperature is -3.0; give 0.0 to"),
        ("/retry", "there is no message"),
        ("/save", "/save has no file"),
        ("/save no/such/folder/x", "cannot write no/such/folder/x: No such file"),
    ],
)
def test_a_wrong_command_is_a_line_and_the_conversation_goes_on(terminal, line, words):
    code, out, err = terminal.run("chat", stdin=f"{line}\nhi\n", tty=True)
    assert code == 0 and words in err.splitlines()[1] and "echo: hi" in out


def test_retry_answers_the_last_message_again(terminal):
    terminal.run("chat", stdin="one\ntwo\n/retry\nthree\n", tty=True)
    seen = terminal.llm.conversations
    assert seen[2] == seen[1] and [each["content"] for each in seen[3]] == [
        "one",
        "echo: one",
        "two",
        "echo: two",
        "three",
    ]


def test_save_writes_the_conversation_and_replaces_no_file(terminal, tmp_path):
    path = tmp_path / "talk.json"
    _, _, err = terminal.run("chat", "--system", "s", stdin=f"öne\n/save {path}\n/save {path}\n", tty=True)
    assert f"3 messages in {path}" in err and f"cannot write {path}: File exists" in err
    roles = [each["role"] for each in json.loads(path.read_text())["messages"]]
    assert roles == ["system", "user", "assistant"] and "öne" in path.read_text()


def test_an_interrupt_at_the_prompt_clears_the_line(terminal, monkeypatch):
    lines = iter([KeyboardInterrupt, "hi", '"""half', KeyboardInterrupt, "/exit"])

    def read(prompt):
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)
    code, _, err = terminal.run("chat", tty=True)
    assert code == 0 and err.count("exits)") == 2 and len(terminal.llm.conversations) == 1


def test_commands_are_not_sent_to_the_model(terminal):
    _, out, _ = terminal.run("chat", stdin="/help\n/fly away\n/exit\nunread\n", tty=True)
    assert "start a new conversation" in out and "there is no command /fly" in out
    assert terminal.llm.conversations == []


def test_a_question_that_is_refused_leaves_the_conversation_as_it_was(terminal):
    class Small(FakeLLM):
        def stream_chat(self, messages, params):
            if messages[-1]["content"] == "long":
                raise PromptTooLong("prompt has 9 tokens, the limit is 8")
            return super().stream_chat(messages, params)

    terminal.kind = Small
    code, out, err = terminal.run("chat", stdin="long\nshort\n", tty=True)
    assert code == 0 and "echo: short" in out
    assert "prompt has 9 tokens, the limit is 8 (/reset starts" in err
    assert terminal.llm.conversations == [[{"role": "user", "content": "short"}]]


class Interrupting(FakeLLM):
    presses = 1

    def between(self):
        if self.conversations[-1][-1]["content"] == "stop me":
            for _ in range(self.presses):
                signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_in_a_conversation_ends_the_answer_alone(terminal):
    terminal.kind = Interrupting
    before = signal.getsignal(signal.SIGINT)
    code, out, _ = terminal.run("chat", stdin="stop me\ngo on\n", tty=True)
    assert code == 0 and signal.getsignal(signal.SIGINT) is before
    assert out == "> echo\n> echo: go on\n> \n"
    assert terminal.llm.num_aborted == 1
    assert terminal.llm.conversations[-1][1] == {"role": "assistant", "content": "echo"}


@pytest.mark.usefixtures("interrupts")
def test_a_second_interrupt_leaves(terminal):
    class Impatient(Interrupting):
        presses = 2

    terminal.kind = Impatient
    code, _, err = terminal.run("chat", stdin="stop me\n", tty=True)
    assert code == 130 and "Traceback" not in err
    assert terminal.llm.closed


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_of_a_single_answer_ends_with_130(terminal):
    terminal.kind = Interrupting
    code, _, err = terminal.run("chat", "stop me")
    assert (code, err) == (130, "\n") and terminal.llm.closed
