import os
import re
import shlex
import subprocess
import sys

import pytest

import slipstream
from child import child_env
from slipstream.base.errors import BadCheckpoint, EngineDead, NotEnoughMemory
from slipstream.serve.cli import doctor, elsewhere
from slipstream.serve.cli.commands import EXAMPLES, MODULES, make_parser


def test_help_lists_the_commands(terminal):
    code, out, _ = terminal.run("--help")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if re.match("    [a-z]", line)] == list(MODULES)
    assert "more flags" not in out


@pytest.mark.parametrize("command", MODULES)
def test_a_command_is_found_without_the_others(terminal, command):
    code, out, _ = terminal.run(command, "--help")
    assert code == 0 and out.startswith(f"usage: slipstream {command} ")


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_the_help_of_a_command_shows_its_flags(terminal, command):
    code, out, _ = terminal.run(command, "--help")
    assert code == 0
    assert "--temperature X" in out and "--page-size N" not in out
    assert out.startswith(f"usage: slipstream {command} [PROMPT")
    assert "--temperature X" in (whole := terminal.run(command, "--help", "all")[1]) and "--page-size N" in whole
    assert terminal.run(command, "--help=all")[1] == whole
    found = terminal.run(command, "-h", "page_size")[1]
    assert "--page-size N" in found and "--temperature" not in found


@pytest.mark.parametrize("command", ["", *MODULES])
def test_the_help_is_one_screen(terminal, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = terminal.run(*command.split(), "--help")
    assert len(out.splitlines()) <= (75 if command == "bench" else 50)
    assert terminal.run("help", *command.split())[1] == terminal.run("--help", *command.split())[1] == out


@pytest.mark.parametrize("example", [each for examples in EXAMPLES.values() for each in examples])
def test_examples_of_the_help_are_commands(example):
    _, *argv = shlex.split(example.rpartition("| ")[2].partition(" >")[0])
    make_parser(argv).parse_args(argv)  # exits for one that is wrong
    assert argv[0] in MODULES


def test_every_command_with_flags_has_an_example_in_its_help(terminal):
    assert EXAMPLES.keys() - {""} == MODULES.keys() - {"version"}
    assert all(each in terminal.run(name, "--help")[1] for name in EXAMPLES if name for each in EXAMPLES[name])


def test_version_needs_no_model(terminal, monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("msgspec", "no-such-package"))
    code, out, _ = terminal.run("version")
    assert code == 0 and terminal.llm is None
    assert out.startswith(f"slipstream {slipstream.__version__}\npython 3.")
    assert out.endswith("no-such-package not installed\n")
    assert terminal.run("--version")[1] == f"slipstream {slipstream.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fly"], "there is no command fly; slipstream --help lists the commands"),
        (["run", "llama3.2", "hi"], "there is no command run; to talk to a model: slipstream chat --model llama3.2"),
        (
            ["pull", "--insecure", "qwen3:4b"],
            "that Ollama has pulled run by name: slipstream chat --model qwen3:4b",
        ),
        (["srve", "--port", "1"], "there is no command srve; did you mean serve?"),
        (
            ["chat", "hi", "--page-sise", "3"],
            "slipstream chat: error: there is no flag --page-sise; did you mean --page-size?",
        ),
        (["chat", "hi", "--page-sise=3"], "did you mean --page-size?"),
        (
            ["serve", "--pipeline-parallel-size", "2"],
            "there is no flag --pipeline-parallel-size; --tensor-parallel-size divides",
        ),
        (["serve", "m", "--block-size=32"], "there is no flag --block-size; here it is --page-size"),
        (["serve", "m", "--trust-remote-code"], "there is no flag --trust-remote-code; leave it out: code of a"),
        (["serve", "m", "--disable-log-requests"], "requests are logged with --log-level info only"),
        (["serve", "--model-id", "a/b"], "there is no flag --model-id; here it is --model"),
        (["chat", "-ngl", "99"], "there is no flag -ngl; a GPU runs all layers; --cpu-offload-gb keeps"),
        (["complete", "Hi"], 'there is no command complete; to complete a text: slipstream generate "TEXT" --no-chat'),
        (["bench", "--xyzzy", "1"], "there is no flag --xyzzy; slipstream bench --help lists the flags"),
        (["rerank", "--temprature", "1"], "there is no flag --temprature; "),
        (["bench", "--xyzzy"], "there is no flag --xyzzy; slipstream bench --help lists the flags"),
        (["version", "now"], "unrecognized arguments: now"),
        (["plan", "a/b"], "unrecognized arguments: a/b; to name a model give --model a/b"),
        (["chat", "why", "is", "it"], "unrecognized arguments: is it; put a text with spaces in quotes"),
        (["chat", "hi", "--page-size", "big"], "it takes a whole number"),
        (["chat", "hi", "--temperature", "-1"], "temperature is -1.0; give 0.0 to 1000000.0"),
        (["chat", "hi", "--temperature", "nan"], "temperature is nan; give a finite number"),
        (["generate", "hi", "--min-tokens", "9", "--max-tokens", "3"], "--min-tokens is 9, --max-tokens 3"),
        (["generate", "hi", "--n", "0"], "n is 0"),
    ],
)
def test_a_wrong_flag_is_one_line_and_loads_no_model(terminal, argv, message):
    code, out, err = terminal.run(*argv)
    assert code == 2 and out == "" and terminal.llm is None
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


def test_names_of_other_programs_lead_to_flags_that_exist():
    parser = make_parser()
    (commands,) = parser._subparsers._group_actions
    ours = {flag for command in commands.choices.values() for flag in command._option_string_actions}
    for names in elsewhere.NAMES.values():
        assert not names.keys() & commands.choices["serve"]._option_string_actions.keys()
        assert {flag for text in names.values() for flag in re.findall(r"--[a-z-]+", text)} <= ours
    words = {name for names in elsewhere.COMMANDS.values() for name in names}
    assert not words & commands.choices.keys()
    told = " ".join(text for names in elsewhere.COMMANDS.values() for text in names.values())
    assert set(re.findall(r"slipstream ([a-z-]+)", told)) <= commands.choices.keys()


def test_the_command_alone_shows_its_help(terminal):
    code, out, err = terminal.run()
    assert (code, err) == (0, "") and out.startswith("usage: slipstream ")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "lower max_model_len, max_num_seqs or kv_cache_memory",
            "lower --max-model-len, --max-num-seqs or --kv-cache-memory",
        ),
        ('use device="cpu" here', "use --device cpu here"),
        ("set dequantize=True, or enforce_eager=False", "set --dequantize, or --no-enforce-eager"),
        ("set --max-model-len; the device has its dtype", "set --max-model-len; the device has its dtype"),
        ("/tmp/page_size/x.max_tokens is not there", "/tmp/page_size/x.max_tokens is not there"),
    ],
)
def test_options_are_named_as_flags(terminal, said, shown):
    terminal.kind = failing(BadCheckpoint(said))
    assert terminal.run("chat", "hi")[2] == f"slipstream: {shown}\n"


def failing(error):
    def make(**options):
        raise error

    return make


@pytest.mark.parametrize(
    ("kind", "code", "cause"),
    [(BadCheckpoint, 2, ""), (NotEnoughMemory, 2, ""), (EngineDead, 1, " (RuntimeError: bad sector)")],
)
def test_an_error_of_ours_is_one_line_and_a_code(terminal, kind, code, cause):
    error = kind("the model is\ncut off")
    error.__cause__ = RuntimeError("bad\nsector")
    terminal.kind = failing(error)
    assert terminal.run("chat", "hi") == (code, "", f"slipstream: the model is cut off{cause}\n")


def test_a_bug_keeps_its_stack_trace(terminal):
    terminal.kind = failing(AssertionError("page 3 released twice"))
    with pytest.raises(AssertionError, match="released twice"):
        terminal.run("chat", "hi")


def test_an_interrupt_while_loading_ends_with_130(terminal):
    terminal.kind = failing(KeyboardInterrupt())
    assert terminal.run("chat", "hi") == (130, "", "\n")


def test_a_reader_that_goes_away_is_no_error():
    read_end, write_end = os.pipe()
    os.close(read_end)  # gone before anything is written
    command = [sys.executable, "-m", "slipstream.serve.cli.main", "version"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, env=child_env())
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", ["chat hi", "generate hi", "embed hi", "plan", "bench", "serve"])
def test_a_missing_path_is_reported_before_torch_is_loaded(command, tmp_path):
    flags = [*command.split(), "--model", str(tmp_path / "none")]
    code = f"""
import sys
from slipstream.serve.cli.main import main
code = main({flags})
print(code, "torch" in sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL, env=child_env()
    )
    assert done.stdout.split() == ["2", "False"], done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"slipstream: there is no {tmp_path}/none here")


def test_a_full_disk_is_one_line():
    """Through the real program: standard output is the device that is always full."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this platform has no /dev/full")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "slipstream.serve.cli.main", "version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=child_env())
    assert done.returncode == 1
    assert done.stderr.startswith("slipstream: ") and len(done.stderr.splitlines()) == 1
