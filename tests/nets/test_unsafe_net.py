from pathlib import Path

import pytest

import slipstream
from nets.unsafe_net import find_unsafe, find_unsafe_in, unneeded_exceptions


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import cloudpickle as cp",
        "from pickle import loads",
        "from multiprocessing import Queue",
        "import torch.multiprocessing, marshal",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "re.match(rf'(.*[.])?({text})$', name)",
        "regex.compile(text, timeout=1)",
        "eval(text)",
        "exec(text)",
        "subprocess.run([sys.executable, name])",
        "subprocess.Popen([sys.executable, name], env=os.environ)",
        "command = [sys.executable, '-m', name]; env = dict(os.environ); subprocess.check_call(command, env=env)",
    ],
)
def test_a_planted_danger_is_caught(line):
    assert find_unsafe(f"def f(path, name, flag, text):\n    {line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "import json",
        "model.eval()",
        "AutoModel.from_pretrained(name, trust_remote_code=False)",
        "re.compile('a+')",
        "re.match(re.escape(x) + '$', name)",
        "re.compile('|'.join(map(re.escape, x)))",
        "subprocess.run(['cc', name])",
        "subprocess.Popen([sys.executable, '-I', name])",
        "subprocess.run([sys.executable, name], env=child_environment())",
        "env = child_environment() | x; subprocess.run([sys.executable, name], env=env)",
    ],
)
def test_what_is_safe_passes(line):
    assert not find_unsafe(f"def f(name, x):\n    {line}\n")


@pytest.mark.parametrize("line", ["path.read_bytes()", "open(path)", "path.open('rb')", "zipfile.ZipFile(path)"])
def test_a_planted_read_of_what_may_be_a_pipe_is_caught(line):
    source = f"def f(path):\n    {line}\n"
    for path in ("checkpoint/a.py", "config/a.py", "text/a.py", "nn/weights/a.py", "engine/build.py", "new/a.py"):
        assert find_unsafe(source, path)
    assert not find_unsafe(source, "serve/cli/new.py")


DEEP = [
    """
def walk(value):
    return [walk(each) for each in value]
""",
    """
def walk(value):
    return list(map(walk, value))
""",
    """
def one(value):
    return two(value)
def two(value):
    return one(value[0])
""",
    """
class A:
    def one(self, value):
        return map(self.two, value)
    def two(self, value):
        return self.one(value[0])
""",
    """
class A:
    def __init__(self):
        self.table = {"a": self.two}
    def one(self, value):
        return self.table["a"](value)
    def two(self, value):
        return self.one(value[0])
""",
    """
def read(text):
    try:
        return known(text)
    except (ValueError, RecursionError):
        return None
""",
    *(f"def read(x):\n    return {call}(x)\n" for call in ("json.loads", "msgspec.json.decode", "decoder.decode")),
]


@pytest.mark.parametrize("source", DEEP)
def test_a_planted_walk_without_a_limit_of_depth_is_caught(source):
    assert find_unsafe(source, "front/new.py") and find_unsafe(source, "serve/http/server/new.py")
    assert not find_unsafe(source, "checkpoint/new.py")


def test_decoding_after_a_check_of_the_depth_passes():
    source = "def read(text):\n    if is_deep_json(text):\n        return None\n    return json.loads(text)\n"
    assert not find_unsafe(source, "front/new.py")
    assert not find_unsafe("def step(self, later):\n    later(self.step)\n", "front/new.py")


def test_an_exception_is_for_one_function_not_for_its_file():
    read, pattern = "def {}(path):\n    open(path)\n", "{} = re.compile(text)\n"
    source = read.format("load_chat_template") + read.format("other") + pattern.format("_IN_QUOTES, x")
    found = find_unsafe(source + pattern.format("_IN_QUOTES") + pattern.format("_ELSE"), "text/new.py")
    assert sorted(finding.split(":")[1] for finding in found) == ["4", "5", "7"]


def test_each_exception_is_needed(tmp_path):
    assert unneeded_exceptions(Path(slipstream.__file__).parent) == set()
    (tmp_path / "new.py").write_text("def read_text(path):\n    re.compile(path)\n    path.open('rb')\n")
    unneeded = unneeded_exceptions(tmp_path)
    assert {"_pattern", "open_regular"} <= unneeded and "read_text" not in unneeded


def test_nothing_from_outside_can_run_code_or_hang_an_expression():
    assert not find_unsafe_in(Path(slipstream.__file__).parent)
