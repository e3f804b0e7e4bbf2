"""Resolution of `runner.resume_dir`, and matching of runs with configurations.

A run is identified by its configuration: `auto` resumes the newest run with the same configuration and seeds. Only keys
for the length of a run, and for what is saved, may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, cast

from pydantic import BaseModel

from rlinf_core.config.sections.runner import RESUME_NEWEST
from rlinf_core.config.tree import to_data
from rlinf_core.errors import CheckpointError, ConfigError, RunError
from rlinf_core.foreign.files import read_text
from rlinf_core.runners.storage.checkpoint import (
    GLANCE,
    Checkpoint,
    first_sound,
    load_manifest,
    open_checkpoint,
    sound_checkpoint,
)
from rlinf_core.runners.storage.checkpoint_store import CheckpointStore
from rlinf_core.runners.storage.run_state import STATE, RunState, read_state, runs_in
from rlinf_core.scalars import plain

# Keys that may differ between a run and its resumption; a key covers everything below it.
FREE_KEYS: Final = (
    *(
        "runner.max_steps",
        "runner.max_epochs",
        "runner.resume_dir",
        "runner.max_restarts",
        "runner.trace",
        "runner.metrics_port",
    ),
    *("runner.only_eval", "runner.skip_checks"),
    *("runner.val_check_interval", "runner.val_before_train", "runner.sample_interval"),
    *("runner.save_interval", "runner.snapshot_interval", "runner.save_on_interrupt", "runner.keep_checkpoints"),
    *("runner.logger.log_path", "runner.logger.project_name", "runner.logger.logger_backends"),
)
_MOST_CANDIDATES: Final = 5
_MOST_DIFFERENCES: Final = 4
_LONGEST_VALUE: Final = 40
# Aliases of YAML can multiply a short text without end.
_MOST_VALUES: Final = 100_000

Values = Mapping[str, object]
"""The values of a configuration by the path of their key, as in `actor.optim.lr`."""


class _Candidate(NamedTuple):
    path: Path
    state: RunState
    store: CheckpointStore

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.store.latest()


def values_of(config_text: str, model: type[BaseModel] | None = None) -> Values | None:
    """Return the identifying values of a resolved configuration; None if the text is not a mapping of a usual size.

    Args:
        config_text: the text of the configuration, as YAML.
        model: the model of its recipe; keys that only other kinds of their section have, which an earlier rlinf wrote,
            are then left out. None: there are none.
    """
    # Its reader is heavier than the rest.
    from rlinf_core.config.diagnostics import Diagnostics
    from rlinf_core.config.reading import STDIN_NAME, decode, read, split_components
    from rlinf_core.config.tree import MappingNode

    findings = Diagnostics()
    source = decode(STDIN_NAME, config_text.encode("utf-8", "replace"), findings)
    tree = None if source is None else read(source, findings)
    # An earlier rlinf kept keys such as `actor,env`.
    split = None if tree is None else split_components(tree, (), findings)
    if split is None or not findings.ok:
        return None
    if model is not None and isinstance(split, MappingNode):
        from rlinf_core.config.validating.kinds import without_idle_keys

        split = without_idle_keys(model, split)
    values = dict(islice(_leaves(plain(to_data(split)), ""), _MOST_VALUES + 1))
    return values if len(values) <= _MOST_VALUES else None


def config_id(values: Values) -> str:
    """Return a digest of the values of a configuration."""
    return sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def find_source(
    resume_dir: str | None, log_path: Path, experiment: str, config_text: str | None = None
) -> Checkpoint | None:
    """Return the checkpoint for `runner.resume_dir`; None for a fresh start.

    Args:
        resume_dir: the `resume_dir` of the configuration.
        log_path: the folder of the runs.
        experiment: the experiment that `auto` searches.
        config_text: the resolved configuration that the run for `auto` must have; None: any.

    Raises:
        CheckpointError: there is no complete checkpoint there, or no run of the experiment has this configuration.
    """
    if resume_dir is None:
        return None
    if resume_dir == RESUME_NEWEST:
        candidates = _candidates(log_path, experiment)
        values = values_of(config_text) if config_text is not None else None
        if values is not None:
            candidates = _of_configuration(candidates, values)
        # Of one run the highest step is the newest, however the clock was set between its checkpoints.
        runs = sorted((run.store.folders() for run in candidates), key=_last_written, reverse=True)
        return first_sound([folder for folders in runs for folder in folders])
    path = Path(resume_dir).absolute()
    store = _store_in(path)
    return sound_checkpoint(path) if store is None else _existing(store.latest_sound(), path)


def named_source(path: Path) -> Checkpoint:
    """Return the checkpoint that a path names: a run, its folder of checkpoints, or one of these. No file is verified.

    Raises:
        CheckpointError: there is no complete checkpoint.
        RunError: run.json of the run is invalid.
    """
    path = path.absolute()
    store = _store_in(path)
    return open_checkpoint(path) if store is None else _existing(store.latest(), path)


def damage_of_source(path: Path) -> list[str]:
    """Return in words what is damaged of the checkpoints that a path names, as far as a glance shows.

    Raises:
        CheckpointError: it names one checkpoint, which is damaged.
        RunError: run.json of the run is invalid.
    """
    path = path.absolute()
    store = _store_in(path)
    if store is not None:
        return store.damaged(GLANCE)
    checkpoint = open_checkpoint(path)
    if sum(checkpoint.manifest.files.values()) <= GLANCE:
        checkpoint.verify()
    return []


def _store_in(path: Path) -> CheckpointStore | None:
    if (path / STATE).is_file():
        return CheckpointStore(path / read_state(path).checkpoints)
    return CheckpointStore(path) if (path / "latest").is_file() else None


def _existing(checkpoint: Checkpoint | None, path: Path) -> Checkpoint:
    if checkpoint is None:
        raise CheckpointError("there is no complete checkpoint to resume from", where=str(path))
    return checkpoint


def _last_written(folders: Sequence[Path]) -> float:
    """Return when the last of a run's checkpoints was written; 0 where there is none."""
    return max(map(_written, folders), default=0.0)


def _written(folder: Path) -> float:
    """Return when a checkpoint was written, damaged or not."""
    try:
        return load_manifest(folder).time
    except CheckpointError:
        return folder.stat().st_mtime


def run_of(checkpoint: Path, log_path: Path) -> Path | None:
    """Return the run folder of a checkpoint; None for one that was copied elsewhere."""
    store = checkpoint.resolve().parent
    # The second is for checkpoints outside of their run (`actor.checkpoint_save_path`).
    for path in (store.parent, log_path / store.name):
        try:
            state = read_state(path)
        except RunError:
            continue
        if (path / state.checkpoints).resolve() == store:
            return path
    return None


def differences(old: Values, new: Values) -> list[str]:
    """Return the differences between two configurations, in words: `actor.optim.lr` is `0.1` there and `0.2` now."""
    names = [name for name in (*old, *(name for name in new if name not in old)) if old.get(name) != new.get(name)]
    return [f"`{name}` is {_shown(old, name)} there and {_shown(new, name)} now" for name in names]


def _candidates(log_path: Path, experiment: str) -> list[_Candidate]:
    """Return the runs of an experiment, newest first."""
    runs = [(path, state) for path, state in runs_in(log_path) if state.experiment == experiment]
    runs.sort(key=lambda run: (run[1].created, run[0].name), reverse=True)
    return [_Candidate(path, state, CheckpointStore(path / state.checkpoints)) for path, state in runs]


def _of_configuration(candidates: Sequence[_Candidate], values: Values) -> list[_Candidate]:
    """Return the candidates of a configuration.

    Raises:
        CheckpointError: there are some with checkpoints, but none with this configuration.
    """
    own = config_id(values)
    same = [candidate for candidate in candidates if (candidate.state.config_id or _id_in(candidate.path)) == own]
    model = None
    if not same:
        # An earlier rlinf made the digest of keys that name several components, and of those of all kinds.
        model = _model_of(values)
        same = [candidate for candidate in candidates[:_MOST_CANDIDATES] if _id_in(candidate.path, model) == own]
    others = [candidate for candidate in candidates if candidate.checkpoint is not None]
    if same or not others:
        return same
    listed = [f"{other.path}: {_why_other(other, values, model)}" for other in others[:_MOST_CANDIDATES]]
    if len(others) > _MOST_CANDIDATES:
        listed.append(f"and {len(others) - _MOST_CANDIDATES} older runs")
    raise CheckpointError(
        "`runner.resume_dir=auto` finds no run of this configuration",
        where=str(others[0].path.parent),
        why="\n".join(listed),
        help=f"name the run to continue from, as in `runner.resume_dir={others[0].path}`, or omit"
        " `runner.resume_dir` to start from scratch; only keys of length and logging may differ"
        " (docs/run-folder.md)",
    )


def _model_of(values: Values) -> type[BaseModel] | None:
    """Return the model of the recipe that a configuration names, which is about to run; None for an unknown one."""
    from rlinf_core.job.find_recipe import find_variant

    try:
        return find_variant(str(values.get("recipe")), values.get).config_model()
    except ConfigError:
        return None


def _id_in(run: Path, model: type[BaseModel] | None = None) -> str | None:
    """Return the digest of the configuration in a run's folder."""
    values = _values_in(run, model)
    return config_id(values) if values is not None else None


def _values_in(run: Path, model: type[BaseModel] | None) -> Values | None:
    try:
        return values_of(read_text(run / "config.yaml"), model)
    except OSError:
        return None


def _why_other(candidate: _Candidate, values: Values, model: type[BaseModel] | None) -> str:
    old = _values_in(candidate.path, model)
    if old is None:
        return "its configuration cannot be read"
    words = differences(old, values)
    omitted = f"; and {len(words) - _MOST_DIFFERENCES} more" if len(words) > _MOST_DIFFERENCES else ""
    return "; ".join(words[:_MOST_DIFFERENCES]) + omitted or "its configuration file was changed"


def _leaves(data: object, path: str) -> Iterator[tuple[str, object]]:
    """Return every value by its path, except those of free keys. An empty list or mapping is a value."""
    if path in FREE_KEYS:
        return
    if isinstance(data, dict) and data:
        for key, value in cast("dict[object, object]", data).items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list) and data:
        for index, value in enumerate(cast("list[object]", data)):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        # Normalise numbers: 1 and 1.0 are equal.
        yield path, int(data) if isinstance(data, float) and data.is_integer() else data


def _shown(values: Values, name: str) -> str:
    if name not in values:
        return "not set"
    value = values[name]
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"`{text}`" if len(text) <= _LONGEST_VALUE else f"`{text[:_LONGEST_VALUE]}...`"
