from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.locate import (
    INDEX,
    TORCH_INDEX,
    TORCH_WHOLE,
    WHOLE,
    has_weights,
    locate,
    require_weights,
    weight_paths,
)

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}


@pytest.mark.parametrize("name", [WHOLE, INDEX, TORCH_WHOLE, TORCH_INDEX])
def test_weights_are_known_by_their_names(tmp_path: Path, name: str) -> None:
    assert not has_weights(tmp_path)
    (tmp_path / name).touch()
    require_weights(tmp_path)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="there is no folder .*none; give"):
        require_weights(tmp_path / "none")


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="has no weights: neither model.safetensors nor pytorch_model.bin.*down"):
        require_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("tf_model.h5", "TensorFlow's"), ("onnx/model.onnx", "ONNX's"), ("consolidated.00.pth", "the makers' own")],
)
def test_weights_of_others_are_named(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(BadCheckpoint, match=rf"its weights are {kind} \({name}\): convert them"):
        require_weights(tmp_path)


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_names_its_base_and_the_alternative(tmp_path: Path, with_config: bool) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (tmp_path / "adapter_model.safetensors").touch()
    if with_config:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"a PEFT adapter \(LORA\) for org/base, not a model.*enable_lora"):
        require_weights(locate(str(tmp_path)).path)


def test_an_adapter_beside_weights_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "adapter_config.json").write_text("[broken")
    (tmp_path / WHOLE).touch()
    with caplog.at_level(logging.WARNING):
        require_weights(tmp_path)
    assert "adapter, which is not applied" in caplog.text
    (tmp_path / WHOLE).unlink()
    with pytest.raises(UnsupportedModel, match=r"adapter \(PEFT\) for a model that it does not name"):
        require_weights(tmp_path)


@pytest.mark.parametrize("target", ["gone", "/dev/zero"])
def test_weights_that_are_no_file_are_named(tmp_path: Path, target: str) -> None:
    """As a link of the hub's cache whose blob was removed."""
    (tmp_path / WHOLE).symlink_to(target)
    with pytest.raises(BadCheckpoint, match=f"{tmp_path / WHOLE} is a broken link, or not a file; download it again"):
        require_weights(tmp_path)


@pytest.mark.parametrize("name", ["a" * 5000, 3, ["x"], None])
def test_an_index_with_names_of_no_files_is_not_valid(tmp_path: Path, name: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(BadCheckpoint, match="index.json is not valid; download it again"):
        weight_paths(tmp_path)
