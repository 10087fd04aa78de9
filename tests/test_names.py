"""Names: a public class name is used once in the package, and words of the former private vocabulary do not return."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from syntax import nodes_of, parse

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "slipstream"

ALLOWED = {  # name: reason
    "Request": "the scheduler's request, and the HTTP request under the name that Starlette gives it",
}


def public_classes(src: Path) -> dict[str, list[str]]:
    """Files by the name of the public class that they define at module level."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(src.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in parse(text).body if "class " in text else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file.relative_to(src)))
    return found


def test_no_two_public_classes_share_a_name():
    classes = public_classes(SRC)
    assert len(classes) > 100
    assert {name: files for name, files in classes.items() if len(files) > 1 and name not in ALLOWED} == {}


def test_two_classes_of_one_name_are_found(tmp_path):
    (tmp_path / "one.py").write_text("class Twice: ...\nclass Once: ...\nclass _Private: ...\n")
    (tmp_path / "two.py").write_text("class Twice: ...\nclass _Private: ...\n")
    assert public_classes(tmp_path) == {"Twice": ["one.py", "two.py"], "Once": ["one.py"]}


# Metaphors of people, and private words for which the field has a term. Matched as whole words, "_" as a space.
BANNED = [
    "nobody", "anybody", "somebody", "everybody", "whoever", "mishap", r"reckon\w*", "way out", "unwanted", "ran dry",
    "(?:is|are|was|were|be) told", "(?:tells?|told|speaks?|says?|asks?) of", "stands? for", "sees? off", "sits? down",
    "saves? up", "gives? way", "takes? heed", "caller's hands", "one who", "those who", "meets?",
]  # fmt: skip
EXCEPTIONS = {  # by file: the line's text, with the reason
    "config/read_pooling.py": "Judge whether the Document meets the requirements",  # Qwen3-Reranker's own prompt
}


def banned_words(src: Path) -> list[str]:
    """Lines of Python, C and Markdown files, code and comments, that have a banned word."""
    pattern = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.I)
    found = []
    for file in sorted(file for kind in ("py", "c", "h", "md") for file in src.rglob(f"*.{kind}")):
        name, text = file.relative_to(src).as_posix(), file.read_text(encoding="utf-8")
        if not pattern.search(re.sub(r"_+|[^\S\n]+", " ", text)):
            continue  # as most files: line by line takes four times as long
        for number, line in enumerate(text.splitlines(), 1):
            allowed = name in EXCEPTIONS and EXCEPTIONS[name] in line
            if not allowed and pattern.search(re.sub(r"_+|\s+", " ", line)):
                found.append(f"{name}:{number}: {line.strip()}")
    return found


@pytest.mark.parametrize("folder", ["src/slipstream", "docs", "benchmarks", "examples", "tests"])
def test_no_word_of_the_private_vocabulary_is_used(folder):
    found = banned_words(ROOT / folder)
    assert [line for line in found if not line.startswith("test_names.py")] == []


def test_banned_words_are_found_in_names_and_comments(tmp_path):
    (tmp_path / "one.py").write_text("_way_out = 1\n# Nobody waits\nwaits_for = 'the one whom'  # told\n")
    (tmp_path / "two.c").write_text("// the row that stands for padding\nint meetsy;\n")
    assert [line.split(": ")[0] for line in banned_words(tmp_path)] == ["one.py:1", "one.py:2", "two.c:1"]


# Names that had several meanings, as whole words of an identifier, with the words to use instead.
AMBIGUOUS = {
    "place": "index, offset, column, path, or draw (a token that a step samples)",
    "places": "indices, offsets, or draws",
    "facts": "info, spec, fields, summary, or machine",
    "report": "result, output, logprobs, stats, or print",
    "way": "method, format, direction, or kernel",
    "ways": "methods, formats, directions, or kernels",
    "reports": "results, outputs, logprobs, or stats",
}
HAVE_SLOTS = "ops/ nn/ runner/ config/ contracts/ engine/ handoff/ ranks/ record/ scheduler/"
HAVE_TEXT_LINES = (
    "base/ checkpoint/late_interaction.py device/device.py device/sync_check/ metrics/ nn/transformers_probe.py "
    "nn/transformers_probe.py ops/platform/native.py ops/platform/native.py ops/gemm/linear/epilogue.py "
    "ops/gemm/linear/epilogue.py parsers/ serve/ text/"
)
HAVE_PLANS = "contracts/ dist/ engine/ ranks/ record/ runner/ scheduler/ serve/"
HAVE_HEADS = "checkpoint/ config/ contracts/ engine/ api/vllm.py nn/ ops/ record/ runner/ serve/cli/plan.py"
HAVE_ADMISSIONS = "config/ contracts/ ops/sampling/ ranks/ record/ runner/ scheduler/"
HAVE_DRAFTS = (
    "config/ contracts/ engine/ handoff/ metrics/ nn/ ops/ params/ ranks/ record/ runner/ scheduler/ "
    "serve/bench/ serve/cli/"
)
HAVE_HELD = (
    "contracts/request.py scheduler/grammar/ scheduler/host_processors.py scheduler/lifecycle.py scheduler/planners.py"
)
HAVE_LATE = "config/buffer_size.py contracts/ engine/ ranks/ record/ runner/ scheduler/"
HAVE_OFFLOADED = "config/ engine/ nn/ runner/"
HAVE_BODIES = "images/fetch.py scheduler/grammar/ serve/ text/"
HAVE_STREAMS = (
    "api/ config/ device/ engine/ front/ images/fetch.py images/video.py runner/ serve/ text/ transport/ "
    "nn/weights/offloaded_layers.py"
)
# Words with one meaning, which belongs to these files; other files use another word.
LIMITED = {
    "head": ("of attention or of a model; else header", HAVE_HEADS),
    "heads": ("of attention or of a model; else headers", HAVE_HEADS),
    "line": ("of text, or a cache line; else entry, vector, row", HAVE_TEXT_LINES),
    "lines": ("of text, or cache lines; else entries, vectors, rows", HAVE_TEXT_LINES),
    "plan": ("of a step, and the command of that name; else estimate, metadata", HAVE_PLANS),
    "plans": ("of steps; else estimates, metadata", HAVE_PLANS),
    "work": ("queued for the device; else requests, function, task, tile list", "device/ runner/"),
    "works": ("queued for the device; else functions, tasks", "device/ runner/"),
    "body": (
        "of an HTTP request, or of a rule; else module, forward, payload",
        "serve/ images/fetch.py scheduler/grammar/ text/",
    ),
    "slot": ("storage in a KV or state cache, or of an adapter; else target, entry, buffer", HAVE_SLOTS),
    "slots": ("storage in a KV or state cache, or of adapters; else targets, entries, buffers", HAVE_SLOTS),
    "admission": ("of a request to a row; else gate, refusal, check", HAVE_ADMISSIONS),
    "admissions": ("of requests to rows; else gates, refusals, checks", HAVE_ADMISSIONS),
    "draft": ("a guessed token; else prompt, candidate", HAVE_DRAFTS),
    "drafts": ("guessed tokens; else prompts, candidates", HAVE_DRAFTS),
    "held": ("a running request that plans leave out; else pending, used, kept", HAVE_HELD),
    "late": ("after the launch of its step; else delayed, following", HAVE_LATE),
    "offload": ("to host memory; else background threads", HAVE_OFFLOADED),
    "offloaded": ("to host memory; else in the background", HAVE_OFFLOADED),
    "stream": ("of a device, or of a response; else streaming GEMM, copies, offloaded layers", HAVE_STREAMS),
    "streams": ("of a device, or of a response; else streaming GEMM, copies, offloaded layers", HAVE_STREAMS),
    "streamed": ("of a response; else streaming GEMM, copies, offloaded layers", HAVE_STREAMS),
}
# these contain such a word
FIELD_TERMS = {"in_place", "In_Place", "__slots__", "late_interaction", "host_late"}
# of a device or the operating system, under the names of their libraries
FIELD_TERMS |= {"current_stream", "cuda_stream", "two_streams", "TWO_STREAMS", "SOCK_STREAM", "Stream_Handler"}


def ambiguous_names(src: Path) -> list[str]:
    """Identifiers of Python files that contain an ambiguous word, or a limited word of other files."""
    found = set()
    for file in sorted(src.rglob("*.py")):
        path = file.relative_to(src).as_posix()
        banned = AMBIGUOUS | {
            word: use for word, (use, files) in LIMITED.items() if not path.startswith(tuple(files.split()))
        }
        text = file.read_text(encoding="utf-8")
        wrong = {word: names for word in set(re.findall(r"\w+", text)) if (names := banned.keys() & _words_of(word))}
        if not wrong:
            continue  # a comment may have such a word; only then are names told from comments, which takes long
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            words = wrong.get(token.string) if token.type == tokenize.NAME else None
            if words and not re.match(r"from |import |.*slots=True", token.line):  # of dataclasses
                found.add(f"{path}:{token.start[0]}: {token.string}: {banned[min(words)]}")
    return sorted(found)


@cache
def _words_of(name: str) -> set[str]:
    """In lower case, also of CamelCase."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    for term in FIELD_TERMS:
        name = name.replace(term, "")
    return set(name.lower().split("_"))


def test_no_name_has_a_word_with_several_meanings():
    assert ambiguous_names(SRC) == []


def test_ambiguous_words_are_found_in_identifiers_only(tmp_path):
    (tmp_path / "one.py").write_text("last_places = 1  # in one place\nattend_in_place = 2\nclass _InPlace: ...\n")
    (tmp_path / "two.py").write_text("class WorkPlace: ...\n'place'\nreplace = 3\n")
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve/three.py").write_text(
        "body = 1\nring_slot = 2\nhead_end = 3\n__slots__ = ()\n@dataclass(slots=True)\nclass A: ...\n"
    )
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner/four.py").write_text("class StageWork: ...\nnum_lines = 1\nplans = []\nshow_report = 2\n")
    found = [line.split(": ")[1] for line in ambiguous_names(tmp_path)]
    assert found == ["last_places", "num_lines", "show_report", "ring_slot", "head_end", "WorkPlace"]


# Docstrings begin with a noun or a verb. "Whether ...", "How many ..." and "Which ..." name a result and are allowed.
NOUN_CLAUSE = re.compile(r"(?:(?:Host|Device)\b[^:.]*: )?(?:What|Where|Who|Why|How)\b(?! (?:many|often|long)\b)")

QUOTED_CLAUSE = re.compile(r"[\"']\s*(?:Host|Device|What|Where|Who|Why|How)\b")  # of any string


def clause_docstrings(src: Path) -> list[str]:
    """Docstrings of modules, classes and functions that begin with a noun clause."""
    found = []
    for file in sorted(src.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if not QUOTED_CLAUSE.search(text):
            continue
        for node in nodes_of(text):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if NOUN_CLAUSE.match(text):
                    found.append(f"{file.relative_to(src).as_posix()}: {text.splitlines()[0]}")
    return found


def test_docstrings_name_their_subject():
    assert clause_docstrings(SRC) == []


def test_docstrings_that_begin_with_a_clause_are_found(tmp_path):
    (tmp_path / "one.py").write_text('"""What a step needs."""\ndef f():\n    """Host: how it runs, and why."""\n')
    (tmp_path / "two.py").write_text(
        'class A:\n    """How a stream is written."""\n\n    def n(self):\n        """How many."""\n'
    )
    assert clause_docstrings(tmp_path) == ["one.py: What a step needs.", "two.py: How a stream is written."]
