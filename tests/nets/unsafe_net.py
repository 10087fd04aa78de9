"""The unsafe net: finds what would let a file or a message run code, or hang the process.

Bytes from outside are decoded as plain data. A regular expression from outside goes to an engine without backtracking
(`ModulePatterns`, the grammars' automata): `re` may need exponential time and holds the GIL meanwhile. Files of a model
are opened as regular files of bounded size.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "multiprocessing"}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load")}
WORDS = {"trust_remote_code", "allow_pickle"}
PATTERNS = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
READS = {"open", "read_bytes", "read_text", "safe_open", "ZipFile", "from_file", "memmap", "fromfile"}
ELSEWHERE = {  # packages that read no file of a model's folder; a new package is searched
    "api", "device", "front", "frontend", "handoff", "metrics", "ops", "runner", "scheduler", "serve", "transport",
}  # fmt: skip
# Exceptions are named by function, class or constant of a module, since files move.
OWN_PATTERNS = {  # expressions that are computed: where their text comes from
    "ModulePatterns": "single characters and classes, as [a-z]",
    "_Parser": "likewise",
    "_IN_QUOTES": "our quotes",
    "_pattern": "our routes",
    "with_reasoning": "names of our fields",
    "Flags": "names of our options",
}
OWN_READS = {  # reads that may be of something else than a regular file of bounded size
    "open_regular": "checks that",
    **dict.fromkeys(["locked", "OwnedFolder", "_remove_abandoned"], "folders and locks of our own"),
    **dict.fromkeys(["read_text", "Cgroup", "cgroups_of", "available_memory"], "the kernel's files"),
    **dict.fromkeys(["_siblings", "_capacity", "answer_calls"], "the kernel's files"),
    "load_chat_template": "chat_template of the options",
    "SafetensorsSource": "is_file before",
    **dict.fromkeys(["_open", "_torch_file_read"], "a file of torch: is_file before"),
    "roberta_tokenizer": "is_file before",
    **dict.fromkeys(["PageClient", "PageListener", "ShardPages"], "memory of another process"),
    "write_private": "a new file",
}
STARTS = {"run", "call", "check_call", "check_output", "Popen"}


def find_unsafe(source: str, path: str = "<snippet>") -> list[str]:
    tree = ast.parse(source)
    found = [*_walk(tree), *(_children(tree) if "sys.executable" in source else ())]
    found += _outside(tree, _patterns(tree), OWN_PATTERNS)
    if path.split("/")[0] not in ELSEWHERE:
        found += _outside(tree, _reads(tree), OWN_READS)
    return [f"{path}:{line}: {what}" for line, what in found]


def find_unsafe_in(root: Path) -> list[str]:
    return [
        finding
        for file in sorted(root.rglob("*.py"))
        for finding in find_unsafe(file.read_text(encoding="utf-8"), file.relative_to(root).as_posix())
    ]


def unneeded_exceptions(root: Path) -> set[str]:
    """Names in OWN_PATTERNS and OWN_READS that excuse nothing in any file."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in root.rglob("*.py")]
    own = ((_patterns, OWN_PATTERNS), (_reads, OWN_READS))
    used = {(id(names), _owner(tree, line)) for tree in trees for find, names in own for line, _ in find(tree)}
    return {name for _, names in own for name in names if (id(names), name) not in used}


def _outside(tree: ast.Module, found: Iterable[tuple[int, str]], names: Mapping[str, str]) -> list[tuple[int, str]]:
    """Findings outside the functions, classes and constants of these names."""
    return [(line, what) for line, what in found if _owner(tree, line) not in names]


def _owner(tree: ast.Module, line: int) -> str:
    """The function, class or constant of the module that this line is a part of."""
    node = next(node for node in tree.body if node.lineno <= line <= (node.end_lineno or 0))
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return getattr(node, "name", "") or getattr(targets[0], "id", "")


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
