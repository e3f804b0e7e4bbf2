"""The folder of a run: its files and its state.

    runs/embodied-20260314-101502/
      run.json        see `rlinf_core.runners.storage.run_state`
      config.yaml     the resolved configuration, secrets masked
      metrics.jsonl   one JSON object for each step
      logs/COMPONENT/rank_N.log
      checkpoints/    see `rlinf_core.runners.storage.checkpoint`
      memory.json     the most memory that each process held, by phase
      trace.json      with `runner.trace: true`
      curve.png, curve.svg
      events.jsonl    its start, checkpoints, restarts and end, one JSON object a line
      origins.json, placement.json, placement.svg, report.html

Imports nothing heavy: commands look into run folders too.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from rlinf_core.config.origins import resolved_text
from rlinf_core.config.secrets import mask
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import RunError
from rlinf_core.node.node_processes import identity
from rlinf_core.process.known_secrets import hidden
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import KEEP_ALL, Checkpoint, CheckpointStore, Fact, config_hash
from rlinf_core.runners.storage.run_state import SCHEMA, STATE, RunState, find_source, read_state, run_of, runs_in
from rlinf_core.runners.storage.run_status import RunStatus

if TYPE_CHECKING:
    from rlinf_core.job.load import Job

_UNSAFE: Final = re.compile(r"[^\w.-]+")
# Fields of the state that belong to one attempt to run, and that a failed attempt to resume gives back.
_OF_AN_ATTEMPT: Final = ("status", "step", "reason", "pid", "host", "start", "address", "ended", "resumed_from")


class RunFolder:
    """One run's folder. Made by `create`, found by `open` and `latest`.

    Attributes:
        path: the folder, absolute.
        resumed_from: the checkpoint that this process continues from, or None; `create` sets it.
    """

    def __init__(self, path: Path, state: RunState, keep: int = KEEP_ALL, resumed_from: Path | None = None) -> None:
        self.path = path
        self.resumed_from = resumed_from
        self._state = state
        self._keep = keep
        # The resolved configuration of a resumed run, which is written when the run has its workers.
        self._pending_config: str | None = None

    @classmethod
    def create(
        cls,
        runner: RunnerConfig,
        recipe: str,
        checkpoint_save_path: str | None = None,
        facts: Mapping[str, Fact] | None = None,
    ) -> Self:
        """Return the folder of a run that starts now, in this process.

        Without `runner.resume_dir`, or with `auto` where the experiment has no checkpoint yet, it is a new one. Else it
        is the folder of that checkpoint; where that has newer ones they stay, and the new run begins in a new folder
        with the metrics up to the checkpoint.

        Args:
            runner: the run's own section.
            recipe: what is trained.
            checkpoint_save_path: `actor.checkpoint_save_path`: checkpoints go to a folder of the run's name in there.
            facts: values that the checkpoint must agree with (`Manifest.facts`); None: not checked here.

        Raises:
            CheckpointError: there is no complete checkpoint where `resume_dir` says, or it does not fit; no folder was
                changed.
            RunError: the folder cannot be written, or the run to continue is still going on.
        """
        log_path = Path(runner.logger.log_path).absolute()
        experiment = runner.logger.experiment_name or recipe
        source = find_source(runner.resume_dir, log_path, experiment)
        if source is not None and facts is not None:
            source.check(facts)
        path = None if source is None else run_of(source.path, log_path)
        home = None if path is None else cls.open(path)
        try:
            if home is None or source is None:
                folder = cls._make(log_path, recipe, experiment, checkpoint_save_path)
                folder._begin(runner, source)
                return folder
            # Of two commands that come at the same moment one goes on with the run.
            with durable.claimed(home.path / STATE) as ours:
                if not ours or home.refresh().alive:
                    raise _going_on(home)
                newest = home.checkpoints.latest()
                if newest is not None and newest.step == source.step:
                    folder = cls(home.path, home.state)
                else:
                    folder = cls._make(log_path, recipe, experiment, checkpoint_save_path)
                    _copy_metrics(home.metrics_file, folder.metrics_file, source.step)
                folder._begin(runner, source)
                return folder
        except OSError as error:
            raise _unwritable(log_path, error) from error

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Return the run folder at `path`, to look into.

        Raises:
            RunError: it is none.
        """
        folder = Path(path).absolute()
        return cls(folder, read_state(folder))

    @classmethod
    def latest(cls, log_path: str | Path, experiment: str | None = None) -> Self | None:
        """Return the newest run folder in `log_path`, of one experiment or of any; None where there is none."""
        found = [cls(path, state) for path, state in runs_in(Path(log_path).absolute())]
        wanted = [each for each in found if experiment in (None, each.state.experiment)]
        return max(wanted, key=lambda each: (each.state.created, each.path.name), default=None)

    @classmethod
    def _make(cls, log_path: Path, recipe: str, experiment: str, checkpoint_save_path: str | None) -> Self:
        """Return a new folder with a state; no folder that exists is touched, and two runs never share one."""
        log_path.mkdir(parents=True, exist_ok=True)
        # A name may hold anything, a folder's name may not; a leading dot would hide it.
        name = f"{_UNSAFE.sub('_', experiment).lstrip('.') or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
        number = 1
        while True:
            path = log_path / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
                break
            except FileExistsError:
                number += 1
        checkpoints = "checkpoints"
        if checkpoint_save_path is not None:
            checkpoints = str(Path(checkpoint_save_path).absolute() / path.name)
        folder = cls(path, RunState(recipe, experiment, created=time.time(), checkpoints=checkpoints))
        folder.logs.mkdir()
        return folder

    def _begin(self, runner: RunnerConfig, source: Checkpoint | None) -> None:
        """Write that this process drives the run from now on; a resumed run's earlier end is kept until `started`."""
        self._keep = runner.keep_checkpoints
        self.resumed_from = source.path if source else None
        before = self._state
        earlier = before.earlier or {name: getattr(before, name) for name in _OF_AN_ATTEMPT}
        self.update(
            earlier=earlier if before.pid else None,
            status=RunStatus.RUNNING,
            step=source.step if source else 0,
            reason="",
            pid=os.getpid(),
            host=socket.gethostname(),
            start=identity(os.getpid()) or "",
            address="",
            ended=None,
            resumed_from=str(source.path) if source else None,
        )

    @property
    def config_file(self) -> Path:
        """The resolved configuration, secrets masked."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """One JSON object for each step; `rlinf_core.runners.metrics` writes and reads it."""
        return self.path / "metrics.jsonl"

    @property
    def trace_file(self) -> Path:
        """The trace for Chrome and Perfetto, with `runner.trace: true`."""
        return self.path / "trace.json"

    @property
    def memory_file(self) -> Path:
        """The most memory that each process held, by phase."""
        return self.path / "memory.json"

    @property
    def logs(self) -> Path:
        """The folder of the workers' logs."""
        return self.path / "logs"

    def log_file(self, component: str, rank: int) -> Path:
        """Return the log of one worker. On another machine it is there only where this folder is shared."""
        return self.logs / component / f"rank_{rank}.log"

    @property
    def checkpoints(self) -> CheckpointStore:
        """The run's checkpoints."""
        return CheckpointStore(self.path / self._state.checkpoints, self._keep)

    @property
    def state(self) -> RunState:
        """The state of the run, as this object read or wrote it last."""
        return self._state

    def refresh(self) -> RunState:
        """Return the state as it is on the disk now.

        Raises:
            RunError: it cannot be read.
        """
        self._state = read_state(self.path)
        return self._state

    def update(self, **changes: Any) -> None:
        """Change fields of the state, by their names in `RunState`, and write it whole.

        Raises:
            RunError: it cannot be written.
        """
        state = self._state._replace(**changes, updated=time.time())
        text = json.dumps({"schema": SCHEMA, **state._asdict()}, indent=2) + "\n"
        try:
            durable.write_whole(self.path / STATE, text)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._state = state

    def started(self) -> None:
        """Write that the run has its workers: from now on it is this attempt that the folder tells of.

        Raises:
            RunError: it cannot be written.
        """
        text, self._pending_config = self._pending_config, None
        if text is not None:
            self._keep_config(text)
        if self._state.earlier is not None:
            self.update(earlier=None)

    def end(self, status: str, reason: str = "") -> None:
        """Write how the run ended: its `RunStatus`, and the first line of why it failed.

        A resumed run that did not get as far as `started` is again what it was.

        Raises:
            RunError: it cannot be written.
        """
        earlier = self._state.earlier
        if earlier is not None and status != RunStatus.FINISHED:
            self.update(**earlier, earlier=None)
        else:
            first = (hidden(reason).strip().splitlines() or [""])[0]
            self.update(status=status, reason=first, ended=time.time(), earlier=None)

    def write_config(self, job: Job) -> str:
        """Keep the resolved configuration, defaults included and secrets masked; return its `config_hash`.

        Raises:
            RunError: it cannot be written.
        """
        if job.tree is None:
            raise ValueError("a job that could not be read has no configuration to keep")
        return self.write_config_text(resolved_text(mask(job.tree, job.secret), job.config))

    def write_config_text(self, text: str) -> str:
        """Keep YAML as the run's configuration, and return its `config_hash`.

        An earlier one that says something else gets a number. That of a resumed run is written by `started`.

        Raises:
            RunError: it cannot be written.
        """
        if self._state.earlier is not None:
            self._pending_config = text
        else:
            self._keep_config(text)
        return config_hash(text)

    def _keep_config(self, text: str) -> None:
        try:
            if self.config_file.exists() and self.config_file.read_text(encoding="utf-8") != text:
                durable.keep_old(self.config_file)
            durable.write_whole(self.config_file, text)
        except OSError as error:
            raise _unwritable(self.path, error) from error


def _going_on(run: RunFolder) -> RunError:
    state = run.state
    return RunError(
        "the run to continue from is still going on",
        where=str(run.path),
        why=f"process {state.pid} on {state.host} drives it" if state.alive else "another command goes on with it",
        help="wait for its end, or end it with `rlinf stop`",
    )


def _copy_metrics(old: Path, new: Path, step: int) -> None:
    from rlinf_core.runners.metrics import copy_metrics

    copy_metrics(old, new, step)


def _unwritable(folder: Path, error: OSError) -> RunError:
    return RunError(
        "the run folder cannot be written",
        where=str(folder),
        why=error.strerror or str(error),
        help="make room there or correct its permissions, or choose another folder by `runner.logger.log_path`",
    )
