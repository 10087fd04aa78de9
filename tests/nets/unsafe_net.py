"""The unsafe net: finds what would let a file or a message run code, or hang the process.

Bytes from outside are decoded as plain data. A regular expression from outside goes to an engine without backtracking
(`ModulePatterns`, the grammars' automata): `re` may need exponential time and holds the GIL meanwhile. Files of a model
are opened as regular files of bounded size. What a client sends has a limited depth: JSON is decoded after
`is_deep_json`, and functions that call themselves are named here with what bounds them. A handler of RecursionError is
no limit: where it is raised depends on the stack.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from syntax import nodes_of, parse, walk

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
    "_is_within": "a type of ours",
    "with_reasoning": "names of our fields",
    "expand_text": "each part by re.escape",
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
    "read_allowed": "checks that, and what --allowed-local-media-path allows",
    "write_private": "a new file",
}
CLIENT = (
    "api",
    "front",
    "images",
    "params",
    "parsers",
    "scheduler",
    "serve/http",
    "text",
)  # of clients
_TAG = "structured_outputs have 64 levels"
OWN_DEPTH = {  # functions and classes that call themselves, decode JSON or handle RecursionError
    **dict.fromkeys(["ControlTokens", "_moved"], "MAX_DEPTH, by is_deep or is_deep_json before"),
    **dict.fromkeys(["_closed", "_Formats", "LarkWriter", "_lazy", "_ends_with_text", "_read"], _TAG),
    **dict.fromkeys(["ascii_patterns"], "a schema of ours"),
    "_Braced": "a schema of a tool, which has 64 levels",
    "is_public": "the IPv4 address in an IPv6 address",
    "_Reader": "_MAX_DEPTH",
    **dict.fromkeys(["_render", "_compiled", "_answer"], "of a template, in a child process"),
    "pythonic_as_json": "_MAX_DEPTH, or is_deep_json before; expressions of Python's parser have no other limit",
    "as_lark": "a converter of a library, which has no other limit",
    "as_text": "a string",
    **dict.fromkeys(["Tokenizer", "ScriptTokenizer"], "a text, or lists of them from Python"),
    **dict.fromkeys(["MaskPool", "NativeMatcher"], "again, once"),
    **dict.fromkeys(["_value", "read_structured_config", "read_profiler_config"], "options"),
    **dict.fromkeys(["_Job", "list_input_items", "_decode", "UrlModels", "main"], "written by a server"),
    **dict.fromkeys(["_summary_of", "_rendered", "_state"], "written by a child process or a library"),
}
DECODERS = {"json.loads", "json_module.loads", "ast.literal_eval", "decoder.decode", "_decoder.decode"}
STARTS = {"run", "call", "check_call", "check_output", "Popen"}


Finding = tuple[int, str]  # line, and what is wrong there
Owned = tuple[int, str, str]  # and the function, class or constant that it is a part of


def find_unsafe(source: str, path: str = "<snippet>") -> list[str]:
    found, patterns, reads, deep = _findings(source)
    found = found + _outside(patterns, OWN_PATTERNS)
    if path.split("/")[0] not in ELSEWHERE:
        found += _outside(reads, OWN_READS)
    if path.startswith(CLIENT):
        found += _outside(deep, OWN_DEPTH)
    return [f"{path}:{line}: {what}" for line, what in found]


@cache
def _findings(source: str) -> tuple[list[Finding], list[Owned], list[Owned], list[Owned]]:
    """What nothing excuses, patterns, reads, and what has no limit of depth."""
    tree, nodes = parse(source), nodes_of(source)
    found = [*_walk(nodes), *(_children(nodes) if "sys.executable" in source else ())]
    patterns, reads, deep = (
        [(*each, _owner(tree, each[0])) for each in own] for own in (_patterns(nodes), _reads(nodes), _deep(tree))
    )
    return found, patterns, reads, deep


def find_unsafe_in(root: Path) -> list[str]:
    return [
        finding
        for file in sorted(root.rglob("*.py"))
        for finding in find_unsafe(file.read_text(encoding="utf-8"), file.relative_to(root).as_posix())
    ]


def unneeded_exceptions(root: Path) -> set[str]:
    """Names in OWN_PATTERNS, OWN_READS and OWN_DEPTH that excuse nothing in any file."""
    of_files = [_findings(file.read_text(encoding="utf-8"))[1:] for file in root.rglob("*.py")]
    used = [{owner for own in found for _, _, owner in own} for found in zip(*of_files, strict=True)]
    return {
        name
        for names, own in zip((OWN_PATTERNS, OWN_READS, OWN_DEPTH), used, strict=True)
        for name in names.keys() - own
    }


def _outside(found: list[Owned], names: Mapping[str, str]) -> list[Finding]:
    """Findings outside the functions, classes and constants of these names."""
    return [(line, what) for line, what, owner in found if owner not in names]


def _owner(tree: ast.Module, line: int) -> str:
    """The function, class or constant of the module that this line is a part of."""
    node = next(node for node in tree.body if node.lineno <= line <= (node.end_lineno or 0))
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return getattr(node, "name", "") or getattr(targets[0], "id", "")


def _walk(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
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


def _patterns(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Expressions for `re` that are neither constants nor made of constants and escaped text."""
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        if node.func.attr not in PATTERNS:
            continue
        called, pattern = ast.unparse(node.func), node.args[0]
        is_ours = isinstance(pattern, ast.Constant) or "re.escape" in ast.unparse(pattern)
        if called.startswith(("re.", "regex.")) and not is_ours:
            yield node.lineno, f"{called}() of a pattern that may come from a file or a request"


def _reads(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Reads of files of a model's folder, where a pipe or a device would hang the start."""
    for node in nodes:
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_memory = bool(node.args) and ast.unparse(node.args[0]).startswith("io.BytesIO(")
            if name in READS and not is_memory and ast.unparse(node.func) not in ("GgufFile.open", "cls.from_file"):
                yield node.lineno, f"{ast.unparse(node.func)}() may wait for ever: open_regular() or read_file()"


def _deep(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Where the depth of a value must have a limit: functions that call themselves, also by others of their file, and
    decoding of JSON. A handler of RecursionError is no limit."""
    functions = dict(_functions(tree.body))
    calls = {name: _called(node, name.rpartition(".")[0]) for name, node in functions.items()}
    for name, node in functions.items():
        reached: set[str] = set()
        new = calls[name]
        while new:
            reached |= new
            new = set().union(*(calls.get(each, ()) for each in new)) - reached
        if name in reached:
            yield node.lineno, f"{name}() calls itself, as often as a value is deep"
        for inner in walk(node):
            if isinstance(inner, ast.Call) and _decodes(inner.func) and "is_deep_json(" not in ast.unparse(node):
                yield inner.lineno, f"{ast.unparse(inner.func)}() without is_deep_json()"
            if isinstance(inner, ast.Name) and inner.id == "RecursionError":
                yield inner.lineno, "RecursionError depends on the stack: is_deep(), is_deep_json()"


def _decodes(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute):
        return False
    called = ast.unparse(function)
    return called in DECODERS or called.endswith(("json.decode", "json.format"))


def _functions(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All functions of a module; methods with the name of their class. An attribute that is made of methods, such as a
    table of them, is one too: what calls it calls these."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner + node.name, node
            for inner in walk(node):
                target = inner.targets[0] if isinstance(inner, ast.Assign) else getattr(inner, "target", None)
                if isinstance(target, ast.Attribute) and isinstance(getattr(inner, "value", None), ast.Dict):
                    yield owner + target.attr, inner


def _called(node: ast.AST, owner: str) -> set[str]:
    """What a function calls, directly or by `map`; of a table, all that is in it."""
    found: list[ast.AST] = [node.value] if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else []
    for inner in walk(node):
        if isinstance(inner, ast.Call):
            found += [inner.func, *(inner.args[:1] if _is_name(inner.func, "map") else ())]
    names: set[str] = set()
    for inner in (each for part in found for each in walk(part)):
        if isinstance(inner, ast.Attribute) and _is_name(inner.value, "self", "cls"):
            names.add(f"{owner}.{inner.attr}")
        elif isinstance(inner, ast.Name):
            names.add(inner.id)
    return names


def _children(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """In a file that starts Python: children whose environment is not `child_environment()`, or made from it. Isolated
    mode (-I) is safe too: it ignores the current directory and PYTHONPATH."""
    safe = {"child_environment()"}
    for node in nodes:
        if isinstance(node, ast.Assign) and "child_environment()" in ast.unparse(node.value):
            safe |= {ast.unparse(target) for target in node.targets}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STARTS:
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if node.args and ast.unparse(node.args[0]).startswith("[sys.executable, '-I'"):
                continue
            env = given.get("env", "")
            is_safe = env in safe or env.startswith("child_environment(")
            if ast.unparse(node.func.value) == "subprocess" and not is_safe:
                yield node.lineno, "starts Python, which may import from the current directory; env=child_environment()"


def _is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names
