"""Statistics of states and actions in the folders that lerobot, openpi, transformers and OpenVLA write."""

# safetensors is largely untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.normalization import Normalization, Scheme, Statistics
from recipes.embodied.models.policy_folder import is_policy_folder, load_normalization
from recipes.sections.model_folders import SETTINGS
from recipes.training.huggingface import first_line
from recipes.training.without_memory import are_shapes_only
from rlinf_core import ConfigError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object

# The library that wrote a folder, which determines statistics, images and prompts.
Layout = Literal["transformers", "lerobot", "openpi", "openvla"]
_PIPELINE: Final = "policy_preprocessor.json"
_OPENPI: Final = "norm_stats.json"
_PROCESSOR: Final = "processor_config.json"
_OPENVLA: Final = "dataset_statistics.json"
# lerobot's modes: the scheme, and the names of the lower and the upper bound; modes without bounds use mean and std.
_MODES: Final[Mapping[str, tuple[Scheme, str, str]]] = {
    "MEAN_STD": ("mean_std", "", ""),
    "MIN_MAX": ("quantile", "min", "max"),
    "QUANTILES": ("quantile", "q01", "q99"),
    "QUANTILE10": ("quantile", "q10", "q90"),
}
# The addition to divisors in each library.
_EPSILONS: Final[Mapping[Layout, float]] = {"lerobot": 1e-8, "openpi": 1e-6, "transformers": 1e-8, "openvla": 1e-8}
_READ: Final = (OSError, ValueError, TypeError, AttributeError, LookupError)


class _Numbers(NamedTuple):
    """Statistics of states or actions, and how they are applied."""

    scheme: Scheme
    statistics: Statistics


def layout_of(about: Mapping[str, Any]) -> Layout:
    """Return which library wrote a folder, by its `config.json`."""
    if "model_type" in about:
        return "transformers"
    return "lerobot" if "type" in about else "openpi"


def load_statistics(
    folder: str | None,
    wanted: str,
    layout: Layout,
    spec: EnvSpec,
    *,
    scheme: Scheme = "mean_std",
    data_set: str | None = None,
) -> Normalization:
    """Return the statistics of a published policy, or of a folder of `save_policy`; none if only shapes are needed.

    Args:
        folder: the folder of the policy; None without one.
        wanted: `actor.model.options.statistics`: `folder`, `none`, or the file of openpi's statistics in the folder.
        layout: the library that wrote the folder.
        spec: the spec of the environment.
        scheme: the scheme that openpi applies to this kind of policy, which its files do not record.
        data_set: the name of OpenVLA's data set; None: the only one.

    Raises:
        ConfigError: the statistics are missing, cannot be read, or are of another environment.
    """
    if not folder or is_policy_folder(folder):
        return load_normalization(folder, spec)
    if wanted == "none" or are_shapes_only():
        return Normalization()
    from_file = wanted != "folder" and layout != "openvla"
    try:
        if from_file or layout == "openpi":
            kept = _openpi(Path(folder), wanted if from_file else None, scheme, spec)
        elif layout == "openvla":
            kept = None, _openvla(Path(folder), data_set)
        else:
            kept = _lerobot(Path(folder)) if layout == "lerobot" else _transformers(Path(folder))
    except _READ as error:
        raise ConfigError(
            f"the statistics in `{folder}` cannot be read",
            why=f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else first_line(error),
            help="copy the folder again",
        ) from None
    if not any(kept) and layout == "lerobot" and _is_plain(Path(folder)):
        return Normalization()
    needed = {"states": kept[0]} if spec.state_size and layout != "openvla" else {}
    lacks = [name for name, numbers in {**needed, "actions": kept[1]}.items() if numbers is None]
    # The modes of lerobot say what is not normalized, and so has no statistics.
    if lacks and (from_file or layout != "lerobot" or not any(kept)):
        raise ConfigError(
            f"`{folder}` has no statistics of {' and '.join(lacks)}",
            why=f"a policy of {layout} learns normalized numbers, and acts at random on others: there is no"
            f" {_files_of(layout)} with them",
            help="copy the complete folder; or, where demonstrations bring statistics or none were used, write"
            " `actor.model.options.statistics: none`",
        )
    normalization = _joined(*kept, _EPSILONS["openpi" if from_file else layout])
    normalization.check(spec.state_size, spec.action_size, folder)
    return normalization


def _files_of(layout: Layout) -> str:
    if layout == "lerobot":
        return f"`policy_preprocessor_step_*_normalizer_processor.safetensors` beside `{_PIPELINE}`"
    return f"`assets/.../{_OPENPI}`" if layout == "openpi" else f"`{_PROCESSOR}`"


def _joined(states: _Numbers | None, actions: _Numbers | None, epsilon: float) -> Normalization:
    """Combine statistics of states and actions into one normalization."""
    of_actions = None if actions is None else actions.scheme
    scheme = of_actions or "mean_std" if states is None else states.scheme
    return Normalization(
        scheme,
        None if states is None else states.statistics,
        None if actions is None else actions.statistics,
        epsilon,
        None if of_actions == scheme else of_actions,
    )


def _lerobot(folder: Path) -> tuple[_Numbers | None, _Numbers | None]:
    """Return the statistics in lerobot's normalization step, according to its modes."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    step, modes = _lerobot_step(folder)
    named = [folder / Path(step["state_file"]).name] if step.get("state_file") else []
    files = named or sorted(folder.glob("policy_preprocessor*normalizer*.safetensors"))
    if not files or not files[0].is_file():
        return None, None
    try:
        tensors = cast("dict[str, Any]", load_file(files[0]))
    except SafetensorError as error:
        raise ValueError(first_line(error)) from None
    columns = {name: tensor.double().flatten().tolist() for name, tensor in tensors.items()}
    kept = [
        _lerobot_numbers(columns, name, modes.get(kind, "IDENTITY"))
        for name, kind in (("observation.state", "STATE"), ("action", "ACTION"))
    ]
    return kept[0], kept[1]


def _lerobot_step(folder: Path) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return lerobot's normalization step (empty if there is none) and its modes."""
    pipeline = folder / _PIPELINE
    steps: list[Any] = load_json_object(read_bounded(pipeline))["steps"] if pipeline.is_file() else []
    none: dict[str, Any] = {}
    step: dict[str, Any] = next((step for step in steps if step.get("registry_name") == "normalizer_processor"), none)
    return step, step.get("config", {}).get("norm_map") or _mapping(folder)


def _is_plain(folder: Path) -> bool:
    """Return whether the folder of a lerobot policy declares states and actions unnormalized."""
    modes = _lerobot_step(folder)[1]
    return all(modes.get(kind) == "IDENTITY" for kind in ("STATE", "ACTION"))


def _mapping(folder: Path) -> Mapping[str, str]:
    """Return the modes in lerobot's `config.json`; mean and std if it has none."""
    about = load_json_object(read_bounded(folder / "config.json"), non_finite=True)
    return about.get("normalization_mapping") or {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}


def _lerobot_numbers(columns: Mapping[str, list[float]], name: str, mode: str) -> _Numbers | None:
    if mode == "IDENTITY":
        return None
    if mode not in _MODES:
        raise ValueError(f"`{mode}` is no known way to normalize `{name}`; known: {', '.join(_MODES)}")
    scheme, low, high = _MODES[mode]
    needed = (low, high) if low else ("mean", "std")
    missing = next((statistic for statistic in needed if f"{name}.{statistic}" not in columns), None)
    if missing is not None:
        raise ValueError(f"`{mode}` needs `{name}.{missing}`, which the file lacks")
    first, second = (columns[f"{name}.{statistic}"] for statistic in needed)
    return _Numbers(scheme, Statistics.of_bounds(first, second) if low else Statistics.of_moments(first, second))


def _openpi(folder: Path, file: str | None, scheme: Scheme, spec: EnvSpec) -> tuple[_Numbers | None, _Numbers | None]:
    """Return openpi's statistics, cut to the environment's sizes: openpi pads numbers with 0."""
    files = [folder / file] if file else sorted(path for path in folder.rglob(_OPENPI) if path.is_file())
    if not files:
        return None, None
    if len(files) > 1:
        names = ", ".join(f"`{path.relative_to(folder)}`" for path in files)
        raise ValueError(f"there are several: {names}; name one as `actor.model.options.statistics`")
    about: dict[str, Any] = load_json_object(read_bounded(files[0]))
    about = about.get("norm_stats", about)
    kept = [
        None if about.get(name) is None else _Numbers(scheme, _cut(about[name], size, scheme))
        for name, size in (("state", spec.state_size), ("actions", spec.action_size))
    ]
    return kept[0], kept[1]


def _cut(about: Mapping[str, Any], size: int, scheme: Scheme) -> Statistics:
    first, second = (about[name] for name in (("mean", "std") if scheme == "mean_std" else ("q01", "q99")))
    if first is None or second is None:
        raise ValueError("there are no quantiles `q01`, `q99`, by which such a policy is normalized")
    if size and not any((*first[size:], *second[size:])):
        first, second = first[:size], second[:size]
    return Statistics.of_moments(first, second) if scheme == "mean_std" else Statistics.of_bounds(first, second)


def _transformers(folder: Path) -> tuple[_Numbers | None, _Numbers | None]:
    """Return the statistics in transformers' processor of a pi0."""
    file = folder / _PROCESSOR
    if not file.is_file():
        return None, None
    about = load_json_object(read_bounded(file), non_finite=True)
    kept: list[_Numbers | None] = []
    for name in ("state", "actions"):
        mean, deviation = about.get(f"{name}_mean"), about.get(f"{name}_std")
        if mean is None or deviation is None:
            kept.append(None)
        else:
            kept.append(_Numbers("mean_std", Statistics.of_moments(mean, deviation)))
    return kept[0], kept[1]


def _openvla(folder: Path, data_set: str | None) -> _Numbers:
    """Return OpenVLA's quantiles of actions: the 1 % and 99 % quantiles become -1 and 1; numbers outside its `mask`
    stay unchanged.
    """
    file = folder / _OPENVLA
    about: dict[str, Any] = (
        load_json_object(read_bounded(file), non_finite=True)
        if file.is_file()
        else load_json_object(read_bounded(folder / SETTINGS), non_finite=True).get("norm_stats") or {}
    )
    chosen = data_set or (next(iter(about)) if len(about) == 1 else None)
    if chosen not in about:
        known = ", ".join(f"`{name}`" for name in list(about)[:30]) or "none"
        raise ConfigError(
            f"`{folder}` has no statistics of `{data_set}`"
            if data_set
            else f"`{folder}` has no single set of statistics",
            why=f"data sets with statistics: {known}",
            help="write the data set of your robot as `actor.model.options.data_set`, or `statistics: none`",
        )
    of_actions = about[chosen]["action"]
    low, high = list(of_actions["q01"]), list(of_actions["q99"])
    mask = of_actions.get("mask") or [True] * len(low)
    if len(mask) != len(low):
        raise ValueError(f"`mask` has {len(mask)} entries for {len(low)} numbers")
    for index, is_scaled in enumerate(mask):
        if not is_scaled:
            low[index], high[index] = -1.0, 1.0
    return _Numbers("quantile", Statistics.of_bounds(low, high))
