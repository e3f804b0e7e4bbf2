"""The folder of a measurement: trials of a job, each in a run folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from rlinf_core.errors import RLinfError
from rlinf_core.foreign.files import FileModel, Name, read_model
from rlinf_core.runners.storage.run_status import RunStatus

FILE: Final = "measurement.json"
SCHEMA: Final = "rlinf.measurement/1"


class _MeasurementFile(FileModel):
    schema_: Annotated[Literal["rlinf.measurement/1"], Field(alias="schema")]
    trials: tuple[Name, ...] = Field(strict=False)


def trials_of(folder: Path) -> list[Path] | None:
    """Return the runs of a measurement that finished and have a record; None: it is no folder of one.

    Raises:
        RLinfError: none of them finished.
    """
    from rlinf_cli.runs.run_lookup import all_runs

    try:
        names = read_model(folder / FILE, _MeasurementFile).trials
    except (FileNotFoundError, NotADirectoryError):
        return None
    runs = [
        run.path
        for run in all_runs(folder)
        if run.state.experiment in names and run.state.status == RunStatus.FINISHED and run.profile_file.exists()
    ]
    if not runs:
        raise RLinfError("no trial of the measurement finished", where=str(folder), help="measure again")
    return runs
