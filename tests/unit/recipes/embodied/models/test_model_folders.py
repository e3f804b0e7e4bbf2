"""Rules about the folder of `actor.model.model_path`, `recipes.embodied.models.folder_facts`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from recipes.embodied.models.folder_facts import require_model_folder
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import ConfigError
from tests.unit.recipes.weights_file import WEIGHTS, weights_of

PI0 = {"config.json": {"model_type": "pi0"}, "model.safetensors": WEIGHTS}
PI05 = {
    "config.json": {"action_dim": 32, "action_horizon": 10},
    "model.safetensors": weights_of("time_mlp_in.weight", "action_out_proj.weight"),
}
SAVED = {"policy.json": {"model": {"model_type": "mlp_policy"}}, "model.safetensors": WEIGHTS}


def written(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def job_of(model_type: str, folder: Path, config: str = "franka_vision_ppo") -> Any:
    return load_with_lint(
        config, (f"actor.model.model_type={model_type}", "actor.model.options={}", f"actor.model.model_path={folder}")
    )


@pytest.mark.parametrize(
    ("model_type", "files"),
    [
        ("pi0", PI0),
        ("pi0", {**PI0, "config.json": {"type": "pi0"}}),
        ("pi05", PI05),
        ("pi0", {**PI05, "model.safetensors": weights_of("model.action_time_mlp_in.weight")}),
        ("smolvla", {**PI0, "config.json": {"type": "smolvla"}}),
        ("openvla_oft", {**PI0, "config.json": {"model_type": "openvla"}}),
        ("lerobot", {**PI0, "config.json": {"type": "act"}}),
        ("mlp_policy", SAVED),
    ],
)
def test_a_folder_of_its_kind_is_well(tmp_path: Path, model_type: str, files: dict[str, Any]) -> None:
    job = job_of(model_type, written(tmp_path / "model", files))
    assert [diagnostic.message for diagnostic in job.diagnostics if diagnostic.path[-1:] == ("model_path",)] == []
    require_model_folder(cast("Any", job.config))


@pytest.mark.parametrize(
    ("model_type", "files", "words"),
    [
        ("pi0", {**PI0, "config.json": {"model_type": "llava"}}, "`pi0` cannot use the `llava`"),
        ("pi0", PI05, "`pi0` cannot use the pi05"),
        ("pi0", {**PI05, "config.json": {"type": "pi0", "chunk_size": 50}}, "`pi0` cannot use the pi05"),
        ("pi05", {**PI05, "model.safetensors": weights_of("model.action_time_mlp_in.bias")}, "cannot use the pi0"),
        ("smolvla", PI0, "`smolvla` cannot use the `pi0`"),
        ("openvla", PI0, "`openvla` cannot use the `pi0`"),
        ("lerobot", PI0, "no policy of lerobot: there is no `type`"),
        ("lerobot", {"config.json": {"type": "act"}}, "has no weights"),
        ("pi0", {"config.json": {"model_type": "pi0"}}, "has no weights"),
        ("pi0", {"model.safetensors": WEIGHTS}, "has no config.json"),
        ("pi0", SAVED, "is a `mlp_policy`, but `model_type` is `pi0`"),
        ("mlp_policy", {"policy.json": {"model": {"model_type": "mlp_policy"}}}, "it lacks `model.safetensors`"),
        ("mlp_policy", PI0, "holds no policy"),
        *(
            (model_type, {**files, "model.safetensors": content}, words)
            for model_type, files in (("pi0", PI0), ("mlp_policy", SAVED))
            for content, words in (
                (b"", "it is empty"),
                (WEIGHTS[:-1], f"are {len(WEIGHTS) - 1} bytes long; their header says {len(WEIGHTS)}"),
                (WEIGHTS[:20], "is not a safetensors file"),
                (b"version https://git-lfs.github.com/spec/v1", "is not a safetensors file"),
            )
        ),
        (
            "mlp_policy",
            {**SAVED, "policy.json": {**SAVED["policy.json"], "statistics": "abc"}},
            "statistics are missing",
        ),
        ("mlp_policy", {**SAVED, "actor/weights": b""}, "is a checkpoint of a run"),
    ],
)
@pytest.mark.parametrize("config", ["franka_vision_ppo", "franka_vision_sft"])
def test_what_is_wrong_with_a_folder_is_found_before_a_run(
    tmp_path: Path, model_type: str, files: dict[str, Any], words: str, config: str
) -> None:
    job = job_of(model_type, written(tmp_path / "model", files), config)
    diagnostics = [diagnostic for diagnostic in job.diagnostics if diagnostic.path == ("actor", "model", "model_path")]
    assert [diagnostic.code for diagnostic in diagnostics] == ["unusable-path"]
    assert words in diagnostics[0].message
    assert not job.ok
    with pytest.raises(ConfigError, match=re.escape(words)):
        require_model_folder(cast("Any", job.config))


def test_missing_folder_may_be_elsewhere_until_a_run_starts(tmp_path: Path) -> None:
    job = job_of("pi0", tmp_path / "model")
    diagnostics = [diagnostic for diagnostic in job.diagnostics if diagnostic.path == ("actor", "model", "model_path")]
    assert [diagnostic.severity.name for diagnostic in diagnostics] == ["WARNING"]
    with pytest.raises(ConfigError, match="does not exist"):
        require_model_folder(cast("Any", job.config))


@pytest.mark.parametrize(
    ("model_type", "settings", "options", "steps"),
    [
        ("pi05", PI05["config.json"], {}, 10),
        ("pi05", {"type": "pi05", "chunk_size": 7, "n_action_steps": 5}, {}, 7),
        ("lerobot", {"type": "diffusion", "horizon": 16}, {}, 16),
        ("pi05", PI05["config.json"], {"action_horizon": 12}, 12),
        ("flow_policy", None, {"action_horizon": 2}, 2),
    ],
)
@pytest.mark.parametrize("config", ["franka_vision_ppo", "franka_vision_sft"])
def test_more_actions_than_are_predicted_are_refused(
    tmp_path: Path, model_type: str, settings: Any, options: dict[str, int], steps: int, config: str
) -> None:
    folder = "null" if settings is None else written(tmp_path / "model", {**PI05, "config.json": settings})

    def reported(executed: int) -> list[str]:
        changes = {"model_type": model_type, "options": json.dumps(options), "model_path": folder}
        overrides = (f"actor.model.{name}={value}" for name, value in changes.items())
        job = load_with_lint(config, (*overrides, f"actor.model.num_action_chunks={executed}"))
        return [diagnostic.message for diagnostic in job.diagnostics if "actions, but" in diagnostic.message]

    assert reported(steps) == []
    (message,) = reported(steps + 1)
    assert message.endswith(f"predicts {steps} actions, but `num_action_chunks` is {steps + 1}")
