"""Reading a run and its policy, for notebooks, programs and comparisons.

run = load_run("runs/embodied-20260314-101502")
pandas.DataFrame(run.metrics).plot("step", "env/return")
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from rlinf_core.config.diagnostics import Diagnostics, Severity
from rlinf_core.config.tree import to_data
from rlinf_core.errors import ConfigError, RunError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.runners.metrics import Metrics, metrics_in
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import Checkpoint, is_checkpoint, sound_checkpoint
from rlinf_core.runners.storage.checkpoint_store import CheckpointStore
from rlinf_core.runners.storage.run_events import RunEvent, story_with_faults
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE, runs_in
from rlinf_core.runners.storage.run_status import RunStatus
from rlinf_core.scalars import plain
from rlinf_core.suggest import escaped

if TYPE_CHECKING:
    from rlinf_core.job.recipe import Policy

# The columns of a record besides its metrics.
_STEP: Final = "step"
_TIME: Final = "time"
_LONGEST_REASON: Final = 120
# The most runs that an error about a folder of runs names.
_NAMED_RUNS: Final = 2
# The most invalid lines of the metrics in `faults`.
_MOST_FAULTS: Final = 3
_DESCRIPTION: Final = "policy.json"


class Run:
    """A run, read from its folder; made by `load_run`.

    Each part is read on first use and kept: open the run again for newer data. All files are read as data: nothing in
    the folder is imported or executed, and no command, path or address in it is followed, except the path of the
    checkpoints.

    Attributes:
        folder: the run folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @property
    def path(self) -> Path:
        """The absolute path of the folder."""
        return self.folder.path

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        return self.folder.state.recipe

    @property
    def status(self) -> RunStatus:
        """The status: running, or how it ended; `failed` also for a run whose process vanished."""
        return self.folder.state.outcome[0]

    @property
    def reason(self) -> str:
        """The reason of a failure, in one line; else empty."""
        return self.folder.state.outcome[1]

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.folder.state.step

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration as nested mappings, defaults included and secrets masked.

        Raises:
            RunError: the configuration cannot be read.
        """
        return config_in(self.folder.config_file)

    @cached_property
    def steps(self) -> list[Metrics]:
        """The metrics of each step, in order, without a torn last line; see also `faults`.

        Raises:
            RunError: the metrics cannot be read.
        """
        return self._lines[0]

    @cached_property
    def _lines(self) -> tuple[list[Metrics], list[str]]:
        try:
            return metrics_in(self.folder.metrics_file).with_faults(_MOST_FAULTS)
        except OSError as error:
            where, why = str(self.folder.metrics_file), error.strerror or str(error)
            raise RunError("the metrics of a run cannot be read", where=where, why=why) from None

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """A record for each step: `step`, `time` in seconds since 1970, and the metrics by name, possibly NaN.

        `pandas.DataFrame(run.metrics)` has a column for each metric.

        Raises:
            RunError: the metrics cannot be read.
        """
        own = (_STEP, _TIME)
        return [
            {_STEP: line.step, _TIME: line.time, **{n: value for n, value in line.metrics.items() if n not in own}}
            for line in self.steps
        ]

    @property
    def result(self) -> dict[str, float]:
        """The metrics of the last evaluation, such as `eval/return`; those of the last step without evaluations.

        Raises:
            RunError: the metrics cannot be read.
        """
        for line in reversed(self.steps):
            evaluation = {name: value for name, value in line.metrics.items() if name.startswith("eval/")}
            if evaluation:
                return evaluation
        return dict(self.steps[-1].metrics) if self.steps else {}

    @property
    def events(self) -> list[RunEvent]:
        """The events of the run, such as start, checkpoints, restarts and end, in order."""
        return self._story[0]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, lowest step first. Their files are not verified (see `Checkpoint.verify`).

        Raises:
            RunError: their folder cannot be read.
        """
        store = self.folder.checkpoints
        try:
            return store.complete()
        except OSError as error:
            where, why = str(store.folder), error.strerror or str(error)
            raise RunError("the checkpoints of a run cannot be read", where=where, why=why) from None

    @cached_property
    def faults(self) -> list[str]:
        """Descriptions of unreadable lines, which `steps` and `events` skip; at most three of the metrics."""
        return [*self._lines[1], *self._story[1]]

    @cached_property
    def _story(self) -> tuple[list[RunEvent], list[str]]:
        return story_with_faults(self.path)

    def __repr__(self) -> str:
        reason = " ".join(self.reason.split())
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]} ..."
        ended = f"{self.status} at step {self.step}" + (f": {reason}" if reason else "")
        # Other people may have written its texts, so a terminal must not act on control characters in them.
        return escaped(f"<Run {self.name}: recipe {self.recipe}, {ended}>").replace("\n", " ")


def config_in(file: Path) -> dict[str, Any]:
    """Return the resolved configuration of a run in a file as nested mappings.

    Raises:
        RunError: the configuration cannot be read.
    """
    diagnostics = Diagnostics()
    where = str(file)
    try:
        content = read_bounded(file)
    except OSError as error:
        why = error.strerror or str(error)
        raise RunError("the configuration of a run cannot be read", where=where, why=why) from None
    # Imported here: the reader takes longer to import than the rest.
    from rlinf_core.config.reading import load_source, read

    source = load_source("-", diagnostics, stdin=content)
    tree = read(source, diagnostics) if source is not None else None
    if tree is None or not diagnostics.ok:
        why = next(finding.message for finding in diagnostics if finding.severity is Severity.ERROR)
        raise RunError("the configuration of a run cannot be read", where=where, why=why)
    return cast("dict[str, Any]", plain(to_data(tree)))


def load_run(path: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, even while it is running.

    Args:
        path: the run folder, as shown by `rlinf runs`.

    Raises:
        RunError: it is not a run folder, or its state cannot be read.
    """
    folder = Path(path)
    if folder.is_dir() and not os.path.lexists(folder / STATE):
        raise folder_without_run(folder)
    return Run(RunFolder.open(folder))


def folder_without_run(folder: Path, otherwise: str = "name a run folder") -> RunError:
    """Return the error for a folder that is not a run; `otherwise` is the advice if it holds no runs either."""
    runs = sorted(runs_in(folder), key=lambda run: (run[1].created, run[0].name))
    newest = [str(path) for path, _ in runs[-_NAMED_RUNS:]]
    help = f"name one of its runs, such as {' or '.join(newest)}" if newest else otherwise
    return RunError("this folder is not a run", where=str(folder), help=help)


def load_policy(path: str | Path, *, checkpoint: str | Path | None = None, device: str = "cpu") -> Policy:
    """Return a trained policy, ready to act. This needs neither a cluster nor the environment.

    Args:
        path: a run folder, for its newest checkpoint; a checkpoint `global_step_N`; or a folder written by `rlinf
            export --format safetensors`.
        checkpoint: another checkpoint of the run.
        device: the torch device of the policy.

    Raises:
        RunError: there is no such folder.
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: the recipe does not support this, or the folder holds no policy.
    """
    from rlinf_core.job.find_recipe import find_recipe
    from rlinf_core.job.load import load_job

    folder = Path(path)
    recipe = config = None
    if (run := _run_of(folder)) is not None:
        # Diagnostics about this machine, such as a missing simulator, do not matter here.
        job = load_job(str(run.config_file))
        recipe, config = job.recipe, job.partial_config
    if checkpoint is not None or is_checkpoint(folder):
        folder = sound_checkpoint(Path(checkpoint or folder)).path
    elif run is not None and (folder / STATE).is_file():
        folder = run.checkpoints.require_sound().path
    elif (newest := CheckpointStore(folder).latest_sound()) is not None:
        folder = newest.path
    recipe = recipe or find_recipe(_recipe_of(folder))
    if (function := recipe.load(recipe.policy)) is None:
        raise ConfigError(f"recipe `{recipe.name}` does not support `load_policy`")
    return function(folder, config, device)


def note_step(folder: Path, step: int) -> None:
    """Add the training step of the weights to the description of an exported policy, if it has a description."""
    file = folder / _DESCRIPTION
    if file.is_file():
        about = {**load_json_object(read_bounded(file)), "step": step}
        durable.write_whole(file, json.dumps(about, indent=1) + "\n")


def _run_of(folder: Path) -> RunFolder | None:
    """Return the run of a run folder, of its folder `checkpoints`, or of one of its checkpoints; else None."""
    for path in (folder, folder.absolute().parent, folder.absolute().parent.parent):
        if (path / STATE).is_file():
            return RunFolder.open(path)
    return None


def _recipe_of(folder: Path) -> str:
    """Return the name of the recipe in the description of a policy folder outside of a run."""
    try:
        return str(load_json_object(read_bounded(folder / _DESCRIPTION))["recipe"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "there is no policy in the folder",
            where=str(folder),
            why=f"`{_DESCRIPTION}` is missing" if isinstance(error, OSError) else f"`{_DESCRIPTION}`: {error}",
            help="name a run, a checkpoint, or a folder of `rlinf export --format safetensors`",
        ) from None
