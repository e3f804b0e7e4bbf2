"""Statistics of lerobot, openpi and transformers, applied as these libraries apply them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.published_statistics import layout_of, load_statistics
from rlinf_core.errors import ConfigError

SPEC = EnvSpec(3, 2)
# The last number of a state never varies.
STATES = np.random.default_rng(0).normal(2, 3, (50, 3)) * [1, 0.1, 0] + [0, 0, 0.7]
ACTIONS = np.random.default_rng(1).uniform(-0.4, 0.9, (50, 2))
PARTS: dict[str, tuple[str, str]] = {
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


def columns() -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for name, rows in (("observation.state", STATES), ("action", ACTIONS)):
        quantiles = {f"q{part:02}": np.quantile(rows, part / 100, axis=0) for part in (1, 10, 50, 90, 99)}
        moments = {"mean": rows.mean(0), "std": rows.std(0), "min": rows.min(0), "max": rows.max(0)}
        made |= {f"{name}.{key}": torch.tensor(row, dtype=torch.float32) for key, row in (moments | quantiles).items()}
    made["observation.images.image.mean"] = torch.zeros(3, 1, 1)
    return made


def of_lerobot(folder: Path, states: str, actions: str, *, pipeline: bool = True) -> dict[str, torch.Tensor]:
    """Write a folder as lerobot saves a policy and its processors; return the tensors of its normalizer."""
    modes = {"VISUAL": "IDENTITY", "STATE": states, "ACTION": actions}
    (folder / "config.json").write_text(json.dumps({"type": "pi0", "normalization_mapping": modes}))
    file = "policy_preprocessor_step_5_normalizer_processor.safetensors"
    save_file(columns(), folder / file)
    steps: list[dict[str, Any]] = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "normalizer_processor", "config": {"eps": 1e-8, "norm_map": modes}, "state_file": file},
    ]
    if pipeline:
        (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    return columns()


def lerobot_normalized(rows: np.ndarray[Any, Any], kept: dict[str, torch.Tensor], name: str, mode: str) -> torch.Tensor:
    """Return what lerobot's step makes of rows, by its formula."""
    values = torch.tensor(rows, dtype=torch.float32)
    if mode == "IDENTITY":
        return values
    if mode == "MEAN_STD":
        return (values - kept[f"{name}.mean"]) / (kept[f"{name}.std"] + 1e-8)
    low, high = (kept[f"{name}.{part}"] for part in PARTS[mode])
    span = torch.where(high == low, torch.tensor(1e-8), high - low)
    return 2 * (values - low) / span - 1


@pytest.mark.parametrize("pipeline", [True, False], ids=["steps", "config"])
@pytest.mark.parametrize(
    ("states", "actions"),
    [("MEAN_STD", "MEAN_STD"), ("QUANTILES", "QUANTILES"), ("MEAN_STD", "MIN_MAX"), ("IDENTITY", "QUANTILE10")],
)
def test_statistics_of_lerobot_are_applied_as_it_does(
    tmp_path: Path, states: str, actions: str, pipeline: bool
) -> None:
    kept = of_lerobot(tmp_path, states, actions, pipeline=pipeline)
    normalization = load_statistics(str(tmp_path), "folder", "lerobot", SPEC)
    rows = STATES.astype(np.float32)
    wanted = lerobot_normalized(rows, kept, "observation.state", states).numpy()
    np.testing.assert_allclose(normalization.normalized_states(rows), wanted, rtol=1e-5, atol=1e-5)
    taken = ACTIONS.astype(np.float32)
    learned = lerobot_normalized(taken, kept, "action", actions).numpy()
    np.testing.assert_allclose(normalization.normalized_actions(taken), learned, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(normalization.actions_of(learned), taken, atol=1e-5)


def of_openpi(folder: Path, *, room: int = 32, name: str = "physical-intelligence/libero") -> dict[str, Any]:
    stats: dict[str, Any] = {}
    for key, rows in (("state", STATES), ("actions", ACTIONS)):
        wide = np.pad(rows, ((0, 0), (0, room - rows.shape[1])))
        low, high = np.quantile(wide, (0.01, 0.99), axis=0)
        named = {"mean": wide.mean(0), "std": wide.std(0), "q01": low, "q99": high}
        stats[key] = {part: row.tolist() for part, row in named.items()}
    (folder / "assets" / name).mkdir(parents=True)
    (folder / "assets" / name / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    return stats


@pytest.mark.parametrize("scheme", ["mean_std", "quantile"])
def test_statistics_of_openpi_are_applied_as_it_does(tmp_path: Path, scheme: Any) -> None:
    stats = of_openpi(tmp_path)
    normalization = load_statistics(str(tmp_path), "folder", "openpi", SPEC, scheme=scheme)
    mean, std, low, high = (np.array(stats["state"][part])[:3] for part in ("mean", "std", "q01", "q99"))
    wanted = (STATES - mean) / (std + 1e-6) if scheme == "mean_std" else (STATES - low) / (high - low + 1e-6) * 2 - 1
    np.testing.assert_allclose(normalization.normalized_states(STATES.astype(np.float32)), wanted, atol=0.2)
    np.testing.assert_allclose(
        normalization.normalized_states(STATES.astype(np.float32))[:, :2], wanted[:, :2], rtol=1e-4, atol=1e-4
    )
    taken = ACTIONS.astype(np.float32)
    np.testing.assert_allclose(normalization.actions_of(normalization.normalized_actions(taken)), taken, atol=1e-5)


def test_one_of_several_files_of_openpi_is_named(tmp_path: Path) -> None:
    of_openpi(tmp_path)
    of_openpi(tmp_path, name="droid")
    with pytest.raises(ConfigError, match=r"there are several: `assets/droid/norm_stats.json`"):
        load_statistics(str(tmp_path), "folder", "openpi", SPEC)
    chosen = load_statistics(str(tmp_path), "assets/droid/norm_stats.json", "openpi", SPEC)
    assert chosen.states is not None


@pytest.mark.parametrize("pipeline", [True, False])
def test_a_policy_that_normalizes_nothing_needs_no_statistics(tmp_path: Path, *, pipeline: bool) -> None:
    of_lerobot(tmp_path, "IDENTITY", "IDENTITY", pipeline=pipeline)
    (tmp_path / "policy_preprocessor_step_5_normalizer_processor.safetensors").unlink()
    assert load_statistics(str(tmp_path), "folder", "lerobot", SPEC) == Normalization()


def test_statistics_of_another_robot_are_refused(tmp_path: Path) -> None:
    of_openpi(tmp_path)
    with pytest.raises(ConfigError, match="have 32 numbers; the environment needs 1"):
        load_statistics(str(tmp_path), "folder", "openpi", EnvSpec(1, 2))


@pytest.mark.parametrize("layout", ["lerobot", "openpi", "transformers"])
def test_folders_without_statistics_are_refused(tmp_path: Path, layout: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"(?s)has no statistics.*learns normalized numbers.*statistics: none"):
        load_statistics(str(tmp_path), "folder", layout, SPEC)
    assert load_statistics(str(tmp_path), "none", layout, SPEC) == Normalization()


def test_missing_parts_of_statistics_are_named(tmp_path: Path) -> None:
    of_lerobot(tmp_path, "QUANTILES", "QUANTILES")
    file = tmp_path / "policy_preprocessor_step_5_normalizer_processor.safetensors"
    save_file({name: column for name, column in columns().items() if not name.endswith("q99")}, file)
    with pytest.raises(ConfigError, match=r"`QUANTILES` needs `observation.state.q99`"):
        load_statistics(str(tmp_path), "folder", "lerobot", SPEC)


def test_epsilons_are_saved_and_old_digests_remain(tmp_path: Path) -> None:
    of_lerobot(tmp_path, "QUANTILES", "QUANTILES")
    normalization = load_statistics(str(tmp_path), "folder", "lerobot", SPEC)
    normalization.save(tmp_path)
    assert Normalization.load(tmp_path) == normalization
    assert normalization.epsilon == 1e-8
    # As an earlier version wrote it.
    assert Normalization().digest() == "0b49912d8313b18e"


def test_layouts_are_known_by_their_settings() -> None:
    assert layout_of({"model_type": "pi0"}) == "transformers"
    assert layout_of({"type": "pi0"}) == "lerobot"
    assert layout_of({"action_dim": 32, "action_horizon": 10}) == "openpi"
