"""The file of recipe `sft`, `recipes.sft.config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter
from rlinf_cli.job.job_file import load_with_lint


@pytest.fixture
def codes(tmp_path: Path) -> Any:
    features = {"observation.state": Feature("float32", (21,)), "action": Feature("float32", (8,))}
    with DatasetWriter(tmp_path / "set", 20, features) as writer:
        writer.add({name: np.zeros((3, *feature.shape), np.float32) for name, feature in features.items()}, "do it")

    def codes_of(*overrides: str) -> list[str]:
        inputs = any(override.startswith(("data.train", "~data.train")) for override in overrides)
        named = [] if inputs else [f"data.train_data_paths={tmp_path / 'set'}"]
        return [
            diagnostic.code for diagnostic in load_with_lint("sft_laptop", [*overrides, *named], environ={}).diagnostics
        ]

    return codes_of


def test_what_is_checked_offline(codes: Any, tmp_path: Path) -> None:
    assert codes() == []
    assert codes("~data.train_data_paths") == ["missing-key"]
    assert codes("data.train_data_paths=/no/such") == ["unusable-path"]
    assert codes("algorithm.gamma=0.5") == ["not-available"]
    assert codes("actor.global_batch_size=30", "actor.micro_batch_size=8") == ["batch-not-divisible"]
    (tmp_path / "set" / "meta" / "stats.json").unlink()
    assert codes() == ["unusable-path"]


def test_environments_are_optional_together(codes: Any) -> None:
    place = "cluster.component_placement"
    joint = f"~{place}.'actor,rollout,env'"
    text = "{node_group: node, placement: 0}"
    assert codes(joint, f"{place}.actor={text}") == []
    assert codes(joint, f"{place}.actor={text}", f"{place}.env={text}") == ["missing-component"]


@pytest.mark.parametrize(
    "key",
    [
        "actor.model.precision",
        "actor.fsdp_config.mixed_precision.param_dtype",
        "actor.fsdp_config.mixed_precision.reduce_dtype",
    ],
)
def test_half_precision_whose_gradients_would_vanish_is_refused(codes: Any, key: str) -> None:
    assert "conflicting-settings" not in codes(f"{key}=bf16")
    assert "conflicting-settings" in codes(f"{key}=fp16")
