"""The folder of state: one server at a time, and of one model."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.serve.saved_files import state_folder
from rlinf_core import ConfigError
from rlinf_core.errors import RunError

MODEL = {"server.model_name": "base", "actor.lora_alpha": 32.0}


def test_folder_is_of_one_server_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="another service uses")
    with state_folder(tmp_path / "state", MODEL), refused, state_folder(tmp_path / "state", MODEL):
        pass
    with state_folder(tmp_path / "state", MODEL):
        assert (tmp_path / "state/model.json").exists()


def test_folder_is_of_one_model(tmp_path: Path) -> None:
    with state_folder(tmp_path, MODEL):
        pass
    words = "`actor.lora_alpha` was 32.0, and is 16.0"
    with pytest.raises(ConfigError, match=words), state_folder(tmp_path, {**MODEL, "actor.lora_alpha": 16.0}):
        pass


def test_damaged_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(RunError, match=r"model\.json"), state_folder(tmp_path, MODEL):
        pass


def test_sessions_of_an_earlier_version_are_told(tmp_path: Path) -> None:
    with state_folder(tmp_path, MODEL):
        pass
    (tmp_path / "sessions/ab-12").mkdir(parents=True)
    (tmp_path / "sessions/ab-12/journal").touch()
    with pytest.raises(ConfigError, match="sessions/ab-12/journal") as refused, state_folder(tmp_path, MODEL):
        pass
    assert f"remove `{tmp_path / 'sessions'}`" in str(refused.value.help)
