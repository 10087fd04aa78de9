"""The unsafe net: finds what would let a file or a message run code, or hang the process.

Bytes from outside are decoded as plain data. A regular expression from outside goes to an engine without backtracking
(`ModulePatterns`, the grammars' automata): `re` may need exponential time and holds the GIL meanwhile. Files of a model
are opened as regular files of bounded size.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "multiprocessing"}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load")}
WORDS = {"trust_remote_code", "allow_pickle"}
PATTERNS = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
OWN_PATTERNS = {  # expressions that are computed: where their text comes from
    "module_patterns.py": "single characters and classes, as [a-z]",
    "pythonic.py": "our quotes",
    "app.py": "our routes",
    "chat_fields.py": "names of our fields",
    "wording.py": "names of our options",
}
READS = {"open", "read_bytes", "read_text", "safe_open", "ZipFile", "from_file", "memmap", "fromfile"}
READERS = ("config", "text", "nn", "engine/rank_adapters.py", "engine/build.py")  # files of a model's folder
OWN_READS = {  # reads that may be of something else than a regular file
    "json_file.py": "checks that",
    "cgroups.py": "the kernel's files",
    "cpus.py": "the kernel's files",
    "host_memory.py": "the kernel's files",
    "chat.py": "chat_template of the options",
    "safetensors.py": "is_file before",
    "torch_file.py": "is_file before",
    "roberta_bpe.py": "is_file before",
}
STARTS = {"run", "call", "check_call", "check_output", "Popen"}


def find_unsafe(source: str, path: str = "<snippet>") -> list[str]:
    tree = ast.parse(source)
    found = [*_walk(tree), *(_children(tree) if "sys.executable" in source else ())]
    found += [] if Path(path).name in OWN_PATTERNS else _patterns(tree)
    if path.startswith(READERS) and Path(path).name not in OWN_READS:
        found += _reads(tree)
    return [f"{path}:{line}: {what}" for line, what in found]


def find_unsafe_in(root: Path) -> list[str]:
    return [
        finding
        for file in sorted(root.rglob("*.py"))
        for finding in find_unsafe(file.read_text(encoding="utf-8"), file.relative_to(root).as_posix())
    ]


def _walk(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        for name in names:
            if name.split(".")[0] in MODULES:
                yield node.lineno, f"imports {name}, which runs or passes on pickled code"
        if isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[tuple[int, str]]:
    called = node.func
    if isinstance(called, ast.Name) and called.id in CALLS:
        yield node.lineno, f"{called.id}() runs text as code"
    if isinstance(called, ast.Attribute) and (ast.unparse(called.value), called.attr) in LOADS:
        yield node.lineno, f"{ast.unparse(called)}() may run what a file says"
    for keyword in node.keywords:
        is_no = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in WORDS and not is_no:
            yield node.lineno, f"{keyword.arg} lets a checkpoint bring code"


def _patterns(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Expressions for `re` that are neither constants nor made of constants and escaped text."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        if node.func.attr not in PATTERNS:
            continue
        called, pattern = ast.unparse(node.func), node.args[0]
        is_ours = isinstance(pattern, ast.Constant) or "re.escape" in ast.unparse(pattern)
        if called.startswith(("re.", "regex.")) and not is_ours:
            yield node.lineno, f"{called}() of a pattern that may come from a file or a request"


def _reads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Reads of files of a model's folder, where a pipe or a device would hang the start."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in READS and ast.unparse(node.func) not in ("GgufFile.open", "cls.from_file"):
                yield node.lineno, f"{ast.unparse(node.func)}() may wait for ever: open_regular() or read_file()"


def _children(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """In a file that starts Python: children whose environment is not `child_environment()`, or made from it. Isolated
    mode (-I) is safe too: it ignores the current directory and PYTHONPATH."""
    safe = {"child_environment()"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "child_environment()" in ast.unparse(node.value):
            safe |= {ast.unparse(target) for target in node.targets}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STARTS:
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if node.args and ast.unparse(node.args[0]).startswith("[sys.executable, '-I'"):
                continue
            env = given.get("env", "")
            is_safe = env in safe or env.startswith("child_environment(")
            if ast.unparse(node.func.value) == "subprocess" and not is_safe:
                yield node.lineno, "starts Python, which may import from the current directory; env=child_environment()"
