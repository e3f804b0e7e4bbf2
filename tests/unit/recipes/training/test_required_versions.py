"""Versions of packages where workers load models: in the interpreter of each worker, before any work."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.demonstrations.data_errors import DatasetError, needed
from recipes.sections.actor import LoraSettings
from rlinf_core import ConfigError, load_job

pytest.importorskip("transformers")
from recipes.language.models.load_model import built_model, built_tokenizer
from recipes.training.huggingface import load_tokenizer, with_lora

JOB = """recipe: {recipe}
cluster:
  num_nodes: 1
  component_placement:
    {components}: {{node_group: node, placement: 0}}
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Pretends that a package is installed in another version."""
    real = importlib.metadata.version

    def pretend(package: str, version: str) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else real(name))

    return pretend


def test_a_worker_with_another_transformers_loads_nothing(installed: Any, tmp_path: Path) -> None:
    installed("transformers", "4.57.1")
    with pytest.raises(
        ConfigError, match=r"`transformers`, of which this Python has 4\.57\.1, out of the range >=5\.3,<6"
    ):
        load_tokenizer(str(tmp_path))


def test_a_transformers_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> Any:
            raise ImportError("huggingface-hub<2.0 is required, but found huggingface-hub==2.4.0\nTry: pip install")

    monkeypatch.setitem(sys.modules, "transformers.utils", Refusing())
    with pytest.raises(ConfigError, match="the installed transformers cannot be imported") as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.why == "huggingface-hub<2.0 is required, but found huggingface-hub==2.4.0"


def test_adapters_of_another_peft_are_refused(installed: Any) -> None:
    model = built_model(built_tokenizer(), hidden_dim=32, layers=1)
    installed("peft", "0.16.0")
    with pytest.raises(ConfigError, match=r"peft.*0\.16\.0") as caught:
        with_lora(model, LoraSettings())
    assert "pip install 'peft>=0.17,<1'" in str(caught.value.help)


def test_data_of_another_reader_are_refused(installed: Any) -> None:
    installed("av", "13.1.0")
    with pytest.raises(DatasetError, match=r"a video needs the package `av`, of which this Python has 13\.1\.0"):
        needed("av", "a video")


@pytest.mark.parametrize(
    ("recipe", "components", "override", "package", "version"),
    [
        ("math", "actor,rollout,reward", "runner.max_steps=1", "transformers", "4.57.1"),
        ("math", "actor,rollout,reward", "actor.model.is_lora=true", "peft", "0.16.0"),
        ("sft_chat", "actor", "runner.max_steps=1", "transformers", "6.0.0"),
        ("embodied", "actor,rollout,env", "actor.model.model_type=pi0", "transformers", "4.57.1"),
        ("embodied", "actor,rollout,env", "env.train.env_type=franka_mujoco", "mujoco", "3.2.7"),
    ],
)
def test_validation_knows_the_versions_that_a_job_needs(
    recipe: str, components: str, override: str, package: str, version: str, installed: Any, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(recipe=recipe, components=components))
    assert not [finding for finding in load_job(file, [override]).diagnostics if finding.code == "missing-extra"]
    installed(package, version)
    said = [
        f"{finding.message} {finding.help}"
        for finding in load_job(file, [override]).diagnostics
        if finding.code == "missing-extra"
    ]
    assert len(said) == 1
    assert f"`{package}`, of which this Python has {version}, out of the range >=" in said[0]
    assert f"pip install '{package}>=" in said[0]
