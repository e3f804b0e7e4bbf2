"""The table of faults that `rlinf chaos` plants: one row a fault, read by the planner, the injector, the judge and the
docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from rlinf_core.errors import ConfigError
from rlinf_core.suggest import did_you_mean, quoted


class Target(StrEnum):
    """A kind of process of a run."""

    WORKER = "worker"
    ACTOR = "actor"
    CHILD = "child of a worker"
    CHANNEL = "channel"
    MANAGER = "manager"
    GCS_SERVER = "gcs_server"
    RAYLET = "raylet"
    LOG_MONITOR = "log monitor"
    RAY_AGENT = "agent of Ray"
    DRIVER = "driver"


class Deed(StrEnum):
    """The ways to disturb a process."""

    KILL = "kill -9"
    TERMINATE = "SIGTERM"
    PAUSE = "SIGSTOP for seconds"
    FREEZE = "SIGSTOP until it is named"
    DAMAGE = "a bit of the newest checkpoint flipped, then kill -9"
    FILL = "no room for files for seconds"


class PlantedFault(NamedTuple):
    """A row of the table.

    Attributes:
        deed: what is done.
        target: the kind of process that it strikes.
        weight: how often it is drawn, relative to the others.
        outcome: what becomes of the run, for the docs.
        ends_command: whether the command `rlinf train` ends by it, and is typed again with `runner.resume_dir=auto`.
    """

    deed: Deed
    target: Target
    weight: int
    outcome: str
    ends_command: bool = False


_AGAIN: Final = "all processes start again; the steps since the checkpoint or snapshot are done again"
_ALONE: Final = "it is started again alone, or all are; at most the steps since the checkpoint are done again"
_WAITED: Final = "it is waited for; nothing is lost"
FAULTS: Final[Mapping[str, PlantedFault]] = {
    "kill-worker": PlantedFault(Deed.KILL, Target.WORKER, 8, _ALONE),
    "kill-child": PlantedFault(Deed.KILL, Target.CHILD, 2, "its worker makes it again, or dies and is started again"),
    "kill-channel": PlantedFault(Deed.KILL, Target.CHANNEL, 2, _AGAIN),
    "kill-manager": PlantedFault(Deed.KILL, Target.MANAGER, 2, _AGAIN),
    "kill-gcs_server": PlantedFault(Deed.KILL, Target.GCS_SERVER, 2, _AGAIN),
    "kill-raylet": PlantedFault(Deed.KILL, Target.RAYLET, 2, _AGAIN),
    "kill-log-monitor": PlantedFault(Deed.KILL, Target.LOG_MONITOR, 1, "nothing is lost: rlinf keeps logs of its own"),
    "kill-agent": PlantedFault(
        Deed.KILL, Target.RAY_AGENT, 1, "Ray ends its raylet, which is named; all processes start again"
    ),
    "kill-driver": PlantedFault(
        Deed.KILL,
        Target.DRIVER,
        2,
        "all processes end; `runner.resume_dir=auto` goes on from the checkpoint",
        ends_command=True,
    ),
    "terminate-driver": PlantedFault(
        Deed.TERMINATE,
        Target.DRIVER,
        1,
        "the step is finished and kept; `runner.resume_dir=auto` goes on",
        ends_command=True,
    ),
    "pause-worker": PlantedFault(Deed.PAUSE, Target.WORKER, 3, _WAITED),
    "pause-channel": PlantedFault(Deed.PAUSE, Target.CHANNEL, 1, _WAITED),
    "pause-manager": PlantedFault(Deed.PAUSE, Target.MANAGER, 1, _WAITED),
    "pause-gcs_server": PlantedFault(Deed.PAUSE, Target.GCS_SERVER, 1, _WAITED),
    "pause-raylet": PlantedFault(Deed.PAUSE, Target.RAYLET, 1, _WAITED),
    "freeze-worker": PlantedFault(Deed.FREEZE, Target.WORKER, 2, "it is named while the run waits; nothing is lost"),
    "damage-checkpoint": PlantedFault(
        Deed.DAMAGE, Target.ACTOR, 2, "the damaged checkpoint is refused; the one before it is used"
    ),
    "fill-driver": PlantedFault(
        Deed.FILL, Target.DRIVER, 1, "the run goes on without that part of its record, or ends with the reason"
    ),
    "fill-actor": PlantedFault(Deed.FILL, Target.ACTOR, 1, "the run ends with the reason where a checkpoint is due"),
}


def chosen_faults(names: Sequence[str]) -> tuple[str, ...]:
    """Return the faults that names select, as `kill-worker`, or `kill` for all that begin so; all without names.

    Raises:
        ConfigError: a name selects none.
    """
    chosen: dict[str, None] = {}
    for name in names:
        matching = [fault for fault in FAULTS if fault == name or fault.startswith(f"{name}-")]
        if not matching:
            help = did_you_mean(name, list(FAULTS)) or f"faults: {quoted(list(FAULTS))}"
            raise ConfigError(f"there is no fault `{name}`", help=help)
        chosen.update(dict.fromkeys(matching))
    return tuple(chosen) or tuple(FAULTS)
