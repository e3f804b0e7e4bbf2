"""A run of a model and data of the HuggingFace Hub, and what goes on from it, at one commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.hub_stand_in import Hub, served

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

RLINF = Path(sys.executable).with_name("rlinf")
OLD, NEW = "a" * 40, "b" * 40
JOB = """recipe: sft_chat
cluster:
  num_nodes: 1
  component_placement:
    actor: {node_group: node, placement: 0}
actor: {global_batch_size: 4, model: {model_path: acme/tiny}}
data: {type: chat, train_data_paths: acme/chats, val_data_paths: acme/chats}
runner: {seq_length: 64, max_steps: 1, save_interval: 1, val_check_interval: -1}
"""
CHATS = "".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(8))


def rlinf(hub: Hub, folder: Path, *arguments: str, code: int = 0) -> str:
    """Run a command in a folder, with a cache of its own and no network but the stand-in."""
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hub"), "RLINF_ADDRESS": "local"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | own
    done = subprocess.run(
        [RLINF, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def repositories(folder: Path, commit: str) -> dict[str, tuple[str, Mapping[str, bytes]]]:
    """Return a small model and conversations, at a commit."""
    from recipes.language.models.load_model import built_model, built_tokenizer

    if not folder.is_dir():
        tokenizer: Any = built_tokenizer()
        built_model(tokenizer, hidden_dim=32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    model = {file.name: file.read_bytes() for file in folder.iterdir()}
    chats = {"data/train.jsonl": CHATS.encode(), "data/test.jsonl": CHATS.encode(), "README.md": b"Chats"}
    return {"models/acme/tiny": (commit, model), "datasets/acme/chats": (commit, chats)}


@pytest.mark.nightly
def test_run_resume_and_evaluation_have_the_commit_of_the_start(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    with served(repositories(tmp_path / "built", OLD)) as hub:
        assert "valid" in rlinf(hub, tmp_path, "validate", "job.yaml")
        assert not any("resolve" in asked for asked in hub.asked)
        said = rlinf(hub, tmp_path, "train", "job.yaml")
        assert "fetching `acme/tiny`, a model of the HuggingFace Hub" in said
        (run,) = (tmp_path / "runs").iterdir()
        config = (run / "config.yaml").read_text()
        assert f"acme/tiny@{OLD}" in config
        assert config.count(f"acme/chats@{OLD}") == 2
        # The author pushes; somebody fetches that.
        hub.repositories = repositories(tmp_path / "built", NEW)
        (tmp_path / "hub/hub/models--acme--tiny/refs/main").write_text(NEW)
        hub.asked.clear()
        rlinf(hub, tmp_path, "train", "job.yaml", f"runner.resume_dir={run}", "runner.max_steps=2")
        assert (run / "config.yaml").read_text().count(OLD) == 3
        assert NEW not in (run / "config.yaml").read_text()
        rlinf(hub, tmp_path, "eval", str(run))
        assert not any(NEW in asked for asked in hub.asked)


def test_without_cache_and_network_nothing_starts(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    with served({}) as hub:
        said = rlinf(hub, tmp_path, "train", "job.yaml", code=2)
    assert "`acme/tiny` is not in the cache of huggingface_hub" in said
    assert "hf download acme/tiny" in said
    assert not (tmp_path / "runs").exists()
