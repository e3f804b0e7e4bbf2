"""JSON files of a model's folder, read once and named where they cannot be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from recipes.sections.model_folders import fault_of_weights, read_object, read_settings
from rlinf_core import ConfigError

BAD = ["[" * 200_000, "{", "[]", '{"a": 1, "a": 2}', '{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_file_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json` cannot be read"):
        read_settings(file)
    assert read_object(file) == {}


def test_infinity_of_a_model_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_settings(file) == read_object(file) == {"time_step_limit": [0.0, math.inf]}


def test_header_of_weights_that_is_nested_deeply_is_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    header = b"[" * 200_000
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    fault = fault_of_weights(file)
    assert fault is not None
    assert "is not a safetensors file" in fault.message
