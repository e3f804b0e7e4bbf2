"""The plan of a sweep, every combination of several values, each checked before any run starts; and its folder."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field

from rlinf_cli.job.job_file import SoundJob, load, refuse_secrets, sound
from rlinf_cli.run.starting import recipe_of
from rlinf_cli.runs.run_lookup import SWEEP, all_runs
from rlinf_core.config.composing.origins import Origin, inline, origins, plain_data
from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.config.tree import NotationError, format_path
from rlinf_core.config.validating.model_fields import types_at
from rlinf_core.errors import ConfigError, RunError
from rlinf_core.foreign.files import BadFileError, FileModel, Name, read_model, write_fault
from rlinf_core.job.load import Job
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.run_folder import RunFolder, config_text_of
from rlinf_core.scalars import plain

MOST_POINTS: Final = 1000
_LONGEST_NAME: Final = 80
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9.]+")
_OPENING: Final = {"[": "]", "{": "}", "(": ")"}


class Point(NamedTuple):
    """One combination of values.

    Attributes:
        name: the name of the point's run, unique within the sweep: `03-lr-1e-4-seed-1`.
        values: the swept values by key, and the seed under `seed`, as typed.
        overrides: the arguments of `rlinf train` that set the values.
    """

    name: str
    values: Mapping[str, str]
    overrides: tuple[str, ...]


def axes_of(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return the keys that have several values separated by commas, with these values as typed.

    A comma in brackets, braces or quotes belongs to one value: `agent.tools=[a,b]` is a list.

    Raises:
        ConfigError: a value is empty or given twice, or a key has two axes.
    """
    axes: dict[str, list[str]] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        values = split_values(text)
        if key in axes:
            raise ConfigError(f"`{key}` is swept twice", where=override, help="give all of its values at once")
        if "" in values:
            help = "remove the comma too many, or write the text in quotes: `KEY='\"a,b\"'`"
            raise ConfigError("a value of the sweep is empty", where=override, help=help)
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            help = "use `--seeds N` to repeat runs"
            raise ConfigError(f"the value `{twice}` is given twice", where=override, help=help)
        axes[key] = values
    return axes


def split_values(text: str) -> list[str]:
    """Split `text` at its commas, except commas in brackets, braces or quotes."""
    parts: list[str] = []
    part = closing = quote = ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not part.strip():
            # A quote starts a quoted text only at the start of a value; elsewhere it is an apostrophe.
            quote = character
        elif character in "\"'" and closing:
            quote = character
        elif character in _OPENING:
            closing += _OPENING[character]
        elif closing and character == closing[-1]:
            closing = closing[:-1]
        elif character == "," and not closing:
            parts.append(part.strip())
            part = ""
            continue
        part += character
    return [*parts, part.strip()]


def points_of(axes: Mapping[str, Sequence[str]], seeds: Sequence[Mapping[str, int]]) -> list[Point]:
    """Return all combinations of values and seeds; points that differ only in seeds are adjacent.

    Args:
        axes: the swept keys and their values.
        seeds: the seed keys and their values for each repetition; if empty, the file's own seeds are used once.

    Raises:
        ConfigError: there are more than `MOST_POINTS` combinations.
    """
    count = math.prod(map(len, axes.values())) * (len(seeds) or 1)
    if count > MOST_POINTS:
        raise ConfigError(f"the sweep has {count} runs, at most are {MOST_POINTS}", help="give fewer values or seeds")
    points: list[Point] = []
    for combination, (number, seed) in itertools.product(itertools.product(*axes.values()), enumerate(seeds or ({},))):
        values = dict(zip(axes, combination, strict=True))
        overrides = tuple(f"{key}={value}" for key, value in {**values, **seed}.items())
        seeded = {**values, "seed": str(number)} if seeds else values
        points.append(Point(_name(len(points) + 1, len(str(count)), seeded), seeded, overrides))
    return points


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return by dotted key its shortest ending that no other key has, as in `lr` for `actor.optim.lr`."""
    names: dict[str, str] = {}
    for key in keys:
        words = key.split(".")
        endings = [".".join(words[-length:]) for length in range(1, len(words) + 1)]
        others = [other for other in keys if other != key]
        names[key] = next(
            (ending for ending in endings if not any(f".{other}".endswith(f".{ending}") for other in others)), key
        )
    return names


def _name(number: int, digits: int, values: Mapping[str, str]) -> str:
    short = short_keys(list(values))
    words = [f"{short[key]}-{value}" for key, value in values.items()]
    slug = _UNSAFE.sub("-", "-".join(words)).strip("-.")[:_LONGEST_NAME].rstrip("-.")
    return f"{number:0{max(2, digits)}d}-{slug}"


_LOG_PATH: Final = "runner.logger.log_path"
_NAME: Final = "runner.logger.experiment_name"
# The keys that the queue sets for each run.
_OWN_KEYS: Final = frozenset({_NAME, "runner.resume_dir"})

_SCALARS: Final = frozenset({bool, int, float, str})


class SweepPlan(NamedTuple):
    """The runs of a sweep.

    Attributes:
        file: the file as named on the command line.
        shared: overrides of all runs.
        points: the runs, in order.
        log_path: the folder of runs named by the file.
        parts: the job of the first run.
    """

    file: str
    shared: tuple[str, ...]
    points: tuple[Point, ...]
    log_path: Path
    parts: SoundJob


def several(file: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that give a key several values.

    A comma in brackets or quotes belongs to one value; so does a comma that is valid for the key, as in a placement.

    Args:
        file: the file of the command line.
        overrides: `KEY=VALUE` and `KEY=A,B`.
    """
    doubtful = [override for override in overrides if len(split_values(override.partition("=")[2])) > 1]
    if not doubtful or file == "-":
        return []
    job = load(file, overrides)
    wrong = {
        finding.span.source.text.split("\n")[finding.span.begin.line - 1]
        for finding in job.diagnostics
        if finding.severity is Severity.ERROR
    }

    def is_plain(override: str) -> bool:
        try:
            path = to_path(parse_path(override.partition("=")[0])[0])
        except NotationError:
            return True
        return job.recipe is not None and not _SCALARS.isdisjoint(types_at(job.recipe.config_model(), path))

    return [override for override in doubtful if override in wrong or is_plain(override)]


def plan_of(file: str, overrides: Sequence[str], swept: Sequence[str], seeds: int) -> SweepPlan:
    """Return the runs for a command line.

    Args:
        file: a path, a shipped config, or `recipe=NAME`.
        overrides: `KEY=VALUE` for all runs, `KEY=A,B` for one value after the other.
        swept: the overrides with several values, from `several`.
        seeds: the number of repetitions with different seeds; 0 for one run with the file's seeds.

    Raises:
        ConfigError: a key cannot be swept or is given twice, or the file has no seeds.
        typer.Exit: the file has errors, which were printed on standard error.
    """
    axes = axes_of(swept)
    for override in overrides:
        key = override.partition("=")[0]
        if key in axes and override not in swept:
            raise ConfigError(f"`{key}` is given twice", where=override, help="give all of its values at once")
        if key in _OWN_KEYS:
            raise ConfigError(f"`{key}` cannot be given for a sweep: each of its runs has its own", where=override)
    refuse_secrets(overrides, "the folder of a sweep")
    shared = [override for override in overrides if override not in swept]
    first = [*shared, *(f"{key}={values[0]}" for key, values in axes.items())]
    job = load(file, first)
    parts = sound(job)
    runner = _checked_runner(job)
    points = points_of(axes, _seeds(parts, seeds, file))
    return SweepPlan(file, tuple(shared), tuple(points), Path(runner), parts)


def overrides_of(plan: SweepPlan, point: Point, folder: Path) -> list[str]:
    """Return the overrides of one run in the folder of the sweep."""
    return [*plan.shared, *point.overrides, f"{_LOG_PATH}={inline(str(folder))}", f"{_NAME}={point.name}"]


def config_ids(plan: SweepPlan, folder: Path) -> dict[str, str]:
    """Check each run like `rlinf validate`, and return the digests of the configurations by run name.

    Raises:
        ConfigError: two runs have the same configuration.
        typer.Exit: a run has errors, which were printed on standard error.
    """
    from rlinf_core.runners.storage.resuming import config_id, values_of

    ids: dict[str, str] = {}
    names: dict[str, str] = {}
    for point in plan.points:
        job = load(plan.file, overrides_of(plan, point, folder))
        twin = names.setdefault(_without_name(sound(job)), point.name)
        if twin != point.name:
            help = "give each value once, however it is written; `--seeds` sets every seed, so sweep none with it"
            raise ConfigError(f"runs {twin} and {point.name} have the same configuration", where=plan.file, help=help)
        ids[point.name] = config_id(values_of(config_text_of(job)) or {})
    return ids


def _without_name(parts: SoundJob) -> str:
    """Return the configuration of a run as text, without the name that the sweep gives it."""
    data = plain_data(parts.model)
    del data["runner"]["logger"]["experiment_name"]
    return json.dumps(data)


def _checked_runner(job: Job) -> str:
    """Return the folder of runs of a job.

    Raises:
        ConfigError: the job's recipe cannot be swept.
    """
    recipe = recipe_of(job)
    runner = getattr(job.config, "runner", None)
    if not isinstance(runner, RunnerConfig):
        what = f"recipe `{recipe.name}` cannot be swept: it has no section `runner`, which names the run folders"
        raise ConfigError(what, where=job.name, help="give its config a field `runner: RunnerConfig`")
    return runner.logger.log_path


def _seeds(parts: SoundJob, count: int, file: str) -> list[Mapping[str, int]]:
    """Return the seed keys and their values for each repetition.

    Each repetition adds one to every seed of training. Seeds of evaluations stay, so that all runs are evaluated from
    the same starts.
    """
    if not count:
        return []

    values = {
        format_path(origin.path): seed
        for origin in origins(parts.tree, parts.model)
        if origin.path[-1] == "seed" and (seed := _seed_of(origin)) is not None
    }
    evaluated = {key for key in values if "eval" in key.split(".")}
    if len(evaluated) == len(values):
        raise ConfigError("the file has no training seed to vary between repeated runs", where=file)
    return [
        {key: value if key in evaluated else value + number for key, value in values.items()} for number in range(count)
    ]


def _seed_of(origin: Origin) -> int | None:
    """Return the seed that a value means, `1e3` included; None for another value, such as null or a text."""
    value = plain(origin.value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and value >= 0 and value % 1 == 0 else None


SCHEMA: Final = "rlinf.sweep/1"


_MOST_BYTES: Final = 16 << 20


_MOST_NAMED: Final = 5


class SweptRun(FileModel):
    """A planned run of the sweep.

    Attributes:
        config_id: the digest of its configuration.
    """

    name: Name
    values: dict[str, str]
    config_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class _SweepFile(FileModel):
    schema_: Annotated[Literal["rlinf.sweep/1"], Field(alias="schema")]
    runs: tuple[SweptRun, ...] = Field(strict=False)


class PointState(NamedTuple):
    """The progress of a point's run.

    Attributes:
        run: the newest run folder of the point; None before the first.
        status: the status of that run; `waiting` before the first.
    """

    run: RunFolder | None
    status: str
    reason: str = ""

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.run.state.step if self.run is not None else 0


WAITING: Final = "waiting"


@contextmanager
def opened(folder: Path, plan: SweepPlan, ids: Mapping[str, str]) -> Generator[bool, None, None]:
    """Lock the folder of a sweep: a new folder, or an existing folder of the same sweep, whose runs are continued.

    Yields:
        Whether the sweep existed.

    Raises:
        RunError: the folder belongs to another sweep, is in use by another process, or cannot be written.
    """
    file = folder / SWEEP
    runs = tuple(
        SweptRun(name=point.name, values=dict(point.values), config_id=ids[point.name]) for point in plan.points
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = file.exists()
        if there:
            _check_same(file, runs)
        elif any(folder.iterdir()):
            raise RunError("the folder for the sweep is not empty", where=str(folder), help="name a new folder")
        else:
            content = {"schema": SCHEMA, "runs": [run.model_dump(mode="json") for run in runs]}
            durable.write_whole(file, json.dumps(content, indent=2) + "\n")
        with durable.claimed(file) as ours:
            if not ours:
                raise RunError("another process works on this sweep", where=str(folder), help="wait for it, or end it")
            yield there
    except OSError as error:
        why = write_fault(folder, error)
        raise RunError("the folder of the sweep cannot be used", where=str(folder), why=why) from error


def _check_same(file: Path, runs: tuple[SweptRun, ...]) -> None:
    try:
        earlier = {run.name: run for run in read_model(file, _SweepFile, _MOST_BYTES).runs}
    except BadFileError as error:
        raise RunError(
            "the file of the sweep cannot be used", where=str(file), why=f"it {error.strerror}", help="use a new folder"
        ) from None
    remedy = "pass the same file, values and seeds, or another folder"
    if list(earlier) != [run.name for run in runs]:
        why = f"it has {len(earlier)} runs, {_names(list(earlier))}; now there are {len(runs)}"
        raise RunError("the folder belongs to another sweep", where=str(file), why=why, help=remedy)
    changed = [run.name for run in runs if earlier[run.name].config_id != run.config_id]
    if changed:
        why = f"the configuration of {_names(changed)} is another one now: the file has changed"
        raise RunError("the folder belongs to another sweep", where=str(file), why=why, help=remedy)


def _names(names: list[str]) -> str:
    rest = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{rest}"


def states(folder: Path, plan: SweepPlan) -> dict[str, PointState]:
    """Return the progress of each run by name, from its newest run folder."""
    runs = sorted(all_runs(folder), key=lambda run: run.state.created)
    newest = {run.state.experiment: PointState(run, *run.state.outcome) for run in runs}
    return {point.name: newest.get(point.name, PointState(None, WAITING)) for point in plan.points}
