"""Folders of models, ours and published ones: what is wrong with one, its statistics, and what these do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.folder_facts import STATISTICS, require_model_folder
from recipes.embodied.models.normalization import Normalization, Scheme, Statistics
from recipes.embodied.models.published_statistics import load_statistics
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


def job_of(model_type: str, folder: Path, config: str = "embodied/franka-vla-laptop") -> Any:
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
        ("mlp_policy", {**SAVED, "policy.json": {**SAVED["policy.json"], "statistics": "a"}}, "statistics are missing"),
        ("mlp_policy", {**SAVED, "actor/weights": b""}, "is a checkpoint of a run"),
    ],
)
@pytest.mark.parametrize("config", ["embodied/franka-vla-laptop", "sft/franka-vla-laptop"])
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
@pytest.mark.parametrize("config", ["embodied/franka-vla-laptop", "sft/franka-vla-laptop"])
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


ROWS = np.random.default_rng(0).normal([1.0, -2.0, 5.0], [0.5, 3.0, 0.0], size=(2000, 3))


def normalization(scheme: Scheme = "mean_std") -> Normalization:
    return Normalization(scheme, states=Statistics.of(ROWS), actions=Statistics.of(ROWS[:, :2]))


def test_normalized_rows_have_mean_and_deviation_or_quantiles() -> None:
    normalized = normalization().normalized_states(ROWS)
    np.testing.assert_allclose(normalized.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(normalized.std(axis=0), [1, 1, 0], atol=1e-6)
    normalized = normalization("quantile").normalized_states(ROWS)
    np.testing.assert_allclose(np.quantile(normalized[:, :2], [0.01, 0.99], axis=0), [[-1, -1], [1, 1]], atol=1e-6)
    assert Normalization().normalized_states(ROWS) is ROWS
    assert Normalization().actions_of(ROWS) is ROWS


@pytest.mark.parametrize("scheme", ["mean_std", "quantile"])
def test_actions_go_there_and_back_as_arrays_and_tensors(scheme: Scheme) -> None:
    result, actions = normalization(scheme), ROWS[:6, :2].reshape(3, 2, 2).astype(np.float32)
    np.testing.assert_allclose(result.actions_of(result.normalized_actions(actions)), actions, rtol=1e-5)
    tensor = torch.from_numpy(actions)
    torch.testing.assert_close(result.actions_of(result.normalized_actions(tensor)), tensor)
    assert result.normalized_actions(tensor).dtype == torch.float32


def test_it_is_the_same_after_a_file(tmp_path: Path) -> None:
    result = normalization("quantile")
    result.save(tmp_path)
    assert Normalization.load(tmp_path) == result
    assert result.digest() != normalization().digest()
    assert Normalization.load(tmp_path / "elsewhere") is None


def test_statistics_of_another_environment_are_refused() -> None:
    normalization().check(3, 2, "here")
    with pytest.raises(ConfigError, match="actions in `here` have 2 numbers; the environment needs 7"):
        normalization().check(3, 7, "here")


@pytest.mark.parametrize(
    "change", [{"scheme": "other"}, {"states": {"mean": [0.0]}}, {"states": 3}, {"actions": {"mean": ["x"]}}]
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    normalization().save(tmp_path)
    path = tmp_path / STATISTICS
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=r"normalization\.json` holds no statistics"):
        Normalization.load(tmp_path)


def test_a_row_short_of_a_number_is_refused(tmp_path: Path) -> None:
    normalization().save(tmp_path)
    path = tmp_path / STATISTICS
    data = json.loads(path.read_text())
    data["states"]["std"].pop()
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"means and . standard deviations"):
        Normalization.load(tmp_path)


@pytest.mark.parametrize("rows", [np.zeros((0, 2)), np.array([[1.0, np.nan]])])
def test_data_without_statistics_are_refused(rows: Any) -> None:
    with pytest.raises(ConfigError, match="statistics of these data"):
        Statistics.of(rows)


SPEC = EnvSpec(3, 2)
# The last number of a state never varies.
STATES = np.random.default_rng(0).normal(2, 3, (50, 3)) * [1, 0.1, 0] + [0, 0, 0.7]
ACTIONS = np.random.default_rng(1).uniform(-0.4, 0.9, (50, 2))
PARTS: dict[str, tuple[str, str]] = {
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


def kept_columns() -> dict[str, torch.Tensor]:
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
    save_file(kept_columns(), folder / file)
    steps: list[dict[str, Any]] = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "normalizer_processor", "config": {"eps": 1e-8, "norm_map": modes}, "state_file": file},
    ]
    if pipeline:
        (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    return kept_columns()


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
    save_file({name: column for name, column in kept_columns().items() if not name.endswith("q99")}, file)
    with pytest.raises(ConfigError, match=r"`QUANTILES` needs `observation.state.q99`"):
        load_statistics(str(tmp_path), "folder", "lerobot", SPEC)


HALF: dict[str, Any] = {"mean": [0] * 2, "std": [1] * 2}


@pytest.mark.parametrize(
    ("layout", "file", "said", "message"),
    [
        ("openpi", "assets/norm_stats.json", {"state": HALF}, "has no statistics of actions"),
        ("openpi", "assets/norm_stats.json", {"actions": HALF}, "has no statistics of states"),
        ("openpi", "assets/norm_stats.json", {"state": HALF, "actions": {"mean": [0] * 2}}, "`std` is missing"),
        (
            "transformers",
            "processor_config.json",
            {"state_mean": [0], "state_std": [1]},
            "has no statistics of actions",
        ),
        (
            "openvla",
            "dataset_statistics.json",
            {"a": {"action": {"q01": [0] * 2, "q99": [1] * 2, "mask": [True]}}},
            "`mask` has 1 entries for 2 numbers",
        ),
    ],
)
def test_half_of_the_statistics_is_refused(tmp_path: Path, layout: Any, file: str, said: Any, message: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_statistics(str(tmp_path), "folder", layout, SPEC)


def test_epsilons_are_saved_and_old_digests_remain(tmp_path: Path) -> None:
    of_lerobot(tmp_path, "QUANTILES", "QUANTILES")
    normalization = load_statistics(str(tmp_path), "folder", "lerobot", SPEC)
    normalization.save(tmp_path)
    assert Normalization.load(tmp_path) == normalization
    assert normalization.epsilon == 1e-8
    # As an earlier version wrote it.
    assert Normalization().digest() == "0b49912d8313b18e"
