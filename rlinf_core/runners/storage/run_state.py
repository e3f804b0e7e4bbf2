"""The state of a run, as `run.json` keeps it. Imports nothing heavy: commands look into run folders too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import Field

from rlinf_core.errors import RunError
from rlinf_core.foreign.file_models import FileModel, Moment, Name, Step, read_model
from rlinf_core.foreign.files import BadFileError
from rlinf_core.node.process_identity import Presence, ProcessIdentity, look
from rlinf_core.runners.storage.run_status import RunStatus

SCHEMA: Final = "rlinf.run/1"
STATE: Final = "run.json"
_MOST_BYTES: Final = 1 << 20
# A reason is one line; an exception may carry a whole tensor in its own.
_MOST_REASON: Final = 4000

Ending = Literal["running", "finished", "failed", "interrupted"]


class Attempt(FileModel):
    """The fields of a run's state that belong to one attempt to run it; a failed attempt to resume gives them back.

    Attributes:
        status: a `RunStatus` but `unknown`.
        step: the last step that is done.
        reason: why it failed, in one line, else empty.
        pid, start, host, boot, pid_namespace, machine: of the process that drives it, see `ProcessIdentity`.
        address: where its Ray is reached, or was, as in `10.0.0.1:6379`; empty before there is one.
        ended: when the run ended, or None.
        resumed_from: the checkpoint that it continued from last, or None.
    """

    status: Ending = "running"
    step: Step = 0
    reason: Annotated[str, Field(max_length=65536)] = ""
    pid: Annotated[int, Field(ge=0, le=2**22)] = 0
    start: Annotated[str, Field(max_length=64)] = ""
    host: Annotated[str, Field(max_length=256)] = ""
    boot: Annotated[str, Field(max_length=64)] = ""
    pid_namespace: Annotated[int, Field(ge=0, lt=2**64)] = 0
    machine: Annotated[str, Field(max_length=64)] = ""
    address: Annotated[str, Field(max_length=512)] = ""
    ended: Moment | None = None
    resumed_from: Name | None = None


class RunState(Attempt):
    """The state of a run, in `run.json`. Moments are seconds since 1970.

    Attributes:
        recipe: what is trained.
        experiment: the name that begins its folder's name.
        config_id: digest of its configuration but for length and logging, see `resuming`; empty where it is not known.
        run_id: drawn when the folder was made, and the same in every copy of it; empty where an earlier rlinf made it.
        created, updated: when the folder was made, and when this was written.
        checkpoints: the folder of its checkpoints.
        earlier: while the run is being resumed and has no workers yet, how it had ended before; else None.
    """

    recipe: Name
    experiment: Name
    run_id: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    config_id: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    created: Moment = 0.0
    updated: Moment = 0.0
    checkpoints: Annotated[Name, Field(min_length=1)] = "checkpoints"
    earlier: Attempt | None = None

    @property
    def process(self) -> ProcessIdentity:
        """The process that drives the run, or did."""
        return ProcessIdentity(self.pid, self.start, self.host, self.boot, self.pid_namespace, self.machine)

    @property
    def presence(self) -> Presence:
        """Whether its process is there, as far as that can be told from here; GONE for a run that wrote its end."""
        return look(self.process, self.updated) if self.status == RunStatus.RUNNING else Presence.GONE

    @property
    def alive(self) -> bool:
        """Whether it is going on on this machine, and its process was seen."""
        return self.presence is Presence.ALIVE

    @property
    def going_on(self) -> bool:
        """Whether it is going on, or may be: its process is seen, or cannot be looked for from here."""
        return self.presence is not Presence.GONE

    def changed(self, **changes: Any) -> Self:
        """Return a state with other values of some fields.

        Raises:
            ValueError: one is none that the field takes.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        reason = str(changes.get("reason", self.reason))
        return type(self).model_validate({**fields, **changes, "reason": reason[:_MOST_REASON]})

    def before_attempt(self) -> Attempt | None:
        """Return how the run had ended before the present attempt, or ended now; None for one that never ran."""
        if self.earlier is not None:
            return self.earlier
        return Attempt(**{name: getattr(self, name) for name in Attempt.model_fields}) if self.pid else None

    def as_before(self) -> Self:
        """Return the state without the present attempt, which came to nothing."""
        earlier = self.earlier or Attempt()
        return self.changed(**{name: getattr(earlier, name) for name in Attempt.model_fields}, earlier=None)

    def encoded(self) -> str:
        """Return the text of `run.json`."""
        return json.dumps({"schema": SCHEMA, **self.model_dump(mode="json")}, indent=2) + "\n"


class _StateFile(RunState):
    """The content of `run.json`."""

    schema_: Annotated[Literal["rlinf.run/1"], Field(alias="schema")]

    def state(self) -> RunState:
        return RunState.model_construct(**{name: getattr(self, name) for name in RunState.model_fields})


class UnreadableRun(NamedTuple):
    """A folder whose `run.json` cannot be used, and why."""

    path: Path
    why: str


def read_state(folder: Path) -> RunState:
    """Return the state of the run in a folder.

    Raises:
        RunError: it is not the folder of a run, or a field of `run.json` has a value that it cannot have.
    """
    try:
        return read_model(folder / STATE, _StateFile, _MOST_BYTES).state()
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            "this is not the folder of a run", where=str(folder), why=f"there is no `{STATE}` in it"
        ) from None
    except OSError as error:
        raise RunError(
            "the state of a run cannot be read",
            where=str(folder),
            why=f"`{STATE}` {_reason(error)}",
            help="nothing was done with this run; correct the file, or delete the folder by hand",
        ) from None


def runs_in(log_path: Path) -> Iterator[tuple[Path, RunState]]:
    """Return the run folders in `log_path`; whatever else lies there is none of ours."""
    for path, state in _look_into(log_path):
        if isinstance(state, RunState):
            yield path, state


def unreadable_runs(log_path: Path) -> list[UnreadableRun]:
    """Return the folders in `log_path` that have a `run.json` that cannot be used."""
    return [UnreadableRun(path, state) for path, state in _look_into(log_path) if isinstance(state, str)]


def _look_into(log_path: Path) -> Iterator[tuple[Path, RunState | str]]:
    """Return the run folders in `log_path`, each with its state, or why that cannot be read."""
    try:
        paths = sorted(log_path.iterdir())
    except OSError:
        return
    for path in paths:
        try:
            yield path, read_state(path)
        except RunError as error:
            try:
                (path / STATE).lstat()
            except OSError:
                continue
            yield path, error.why or error.message


def _reason(error: OSError) -> str:
    reason = error.strerror or type(error).__name__
    return reason if isinstance(error, BadFileError) else f"cannot be read: {reason}"
