"""Recipes, the parts that one may have, and the jobs that select them.

A part is a function, or names one as `module:function`, which is then imported when it is needed: listing recipes and
checking a file imports nothing heavy. Each part has a type here, which says what is called and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from rlinf_core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rlinf_core.advice.job_flow import JobFlow
    from rlinf_core.config.diagnostics import Diagnostics
    from rlinf_core.config.machines.cluster import ClusterConfig
    from rlinf_core.config.model import WorldSizes
    from rlinf_core.config.source import SourceText
    from rlinf_core.config.tree import MappingNode
    from rlinf_core.config.tree import Path as KeyPath
    from rlinf_core.config.validating.pruning import Validated
    from rlinf_core.job.report import Report
    from rlinf_core.placement.resolve import Resolution
    from rlinf_core.topology import ClusterTopology


# Parts that wait on the host where a process leaves its accelerator to others, and all that lie on the accelerator.
_RESIDENT: Final = ("weights", "optimizer", "critics")
DEVICE_PARTS: Final = (
    *(*_RESIDENT, "gradients", "activations", "advantages", "batch", "merged adapter", "keys and values"),
    *("gathered weights", "gathered gradients"),
)
# Host memory of a process that computes on an accelerator: libraries of CUDA and their context. On an H200 with torch
# 2.11 an engine took 1.5 GiB, and a trainer that compiles kernels 2.2.
ACCELERATOR_LIBRARIES: Final = 3 << 29


class ProcessForecast(NamedTuple):
    """The most memory that the processes of a component will hold; each holds the same.

    Attributes:
        component: the component of the job.
        processes: the number of processes.
        parts: bytes by what they hold: `base` (interpreter and libraries), `weights`, `gradients`, ...
        shared: bytes of shared memory (/dev/shm) that its messages take at most, over all processes.
        offloads: whether it leaves its accelerator while others use it.
        notes: what is not known.
        on_accelerator: bytes of those parts that take another amount on an accelerator.
    """

    component: str
    processes: int
    parts: Mapping[str, int]
    shared: int = 0
    offloads: bool = False
    notes: tuple[str, ...] = ()
    on_accelerator: Mapping[str, int] = MappingProxyType({})

    def parts_of(self, *, accelerated: bool) -> dict[str, int]:
        """Return the parts of a process that has an accelerator, or has none."""
        return {**self.parts, **self.on_accelerator} if accelerated else dict(self.parts)

    def held(self, *, accelerated: bool) -> tuple[int, int]:
        """Return the bytes of the host's memory and of an accelerator's, of a process that has one or has none."""
        parts = self.parts_of(accelerated=accelerated)
        host = sum(parts.values())
        if not accelerated:
            return host, 0
        device = sum(parts.get(name, 0) for name in DEVICE_PARTS)
        # Weights are loaded on the host, and go to the accelerator from there.
        waiting = _RESIDENT if self.offloads else _RESIDENT[:1]
        stays = ACCELERATOR_LIBRARIES + sum(parts.get(name, 0) for name in waiting)
        return host - device + stays, device


P = TypeVar("P")
Fact: TypeAlias = "str | int | float | bool | None"
Emit: TypeAlias = Callable[[str], None]
"""Shows a line of progress to the person who waits."""


class Trial(NamedTuple):
    """A program that `rlinf doctor` runs where a component is placed, in the environment of its processes.

    The last line that it prints is a JSON object: `verdict` (`ok`, `warning` or `fault`), `what` was seen and `help`.

    Attributes:
        component: the component that has this interpreter, these variables and these nodes.
        what: name of the check, as in `simulator`.
        module, arguments: what `python -m` runs.
        seconds: the seconds that it may take.
        each_process: whether a last argument follows, in JSON: a list of the variables that the component's processes
            on that node get from their places, as `WORLD_SIZE` and the one that says which accelerators they see.
    """

    component: str
    what: str
    module: str
    arguments: tuple[str, ...] = ()
    seconds: float = 120.0
    each_process: bool = False


Program: TypeAlias = Callable[["Job", Any, Callable[[Any], None]], None]
"""`program(job, folder, listener)`, of `rlinf train`: runs to the end, or raises what failed once its workers ended.

`folder` is the run's `RunFolder`; `listener` takes the events of the run (`rlinf_core.runners.events`)."""

Check: TypeAlias = Callable[[Any, "WorldSizes", "Report"], None]
"""`check(config, world_sizes, report)`, the rules between sections: reports what does not fit together.

`config` is the validated file, `world_sizes` the number of processes of each placed component, None where that cannot
be known yet."""

Facts: TypeAlias = Callable[[Any], Mapping[str, Fact]]
"""`facts(config)`: the values that a run must share with the checkpoint it continues from, by the path of the key.

A resume that does not fit is refused before anything is written."""


class Record(Protocol):
    """`rlinf record`: writes demonstrations into a new folder.

    A person drives, or corrects the policy of `checkpoint`, where `device` is named; without either the environment's
    expert acts. `fps` is rows per second; None: as many as the environment takes actions.

    Returns:
        `folder`, `episodes`, `frames`, `tried` and `successes`.
    """

    def __call__(
        self,
        job: Job,
        folder: Path,
        *,
        episodes: int,
        checkpoint: Path | None,
        device: str | None,
        device_options: Mapping[str, str] | None,
        successes_only: bool,
        video: bool,
        fps: int | None,
        emit: Emit,
    ) -> Mapping[str, Any]: ...


class Evaluate(Protocol):
    """`rlinf eval`: writes `eval.json` into a new folder and returns its object. Default of `episodes`: the file's."""

    def __call__(
        self,
        job: Job,
        checkpoint: Path | None,
        folder: Path,
        *,
        episodes: int | None,
        allow_training_starts: bool,
        video: bool | None,
        emit: Emit,
    ) -> Mapping[str, Any]: ...


class Play(Protocol):
    """`rlinf eval --play`: writes a video of episodes into `file` and returns how they went: `file` and `episodes`."""

    def __call__(self, job: Job, checkpoint: Path, file: Path, *, episodes: int, emit: Emit) -> Mapping[str, Any]: ...


class Replay(Protocol):
    """`rlinf why --replay`: repeats an item that killed processes, a `QuarantinedItem`, in a separate process.

    Returns:
        How the process died this time, in words; empty if it lived.
    """

    def __call__(self, job: Job, item: Any, *, emit: Emit) -> str: ...


Export: TypeAlias = Callable[[Any, Path, Path, str], Mapping[str, Any]]
"""`export(config, checkpoint, folder, kind)`, of `rlinf export`: writes a policy into a new folder in a format of that
kind. Returns `folder`, `files`, `inputs`, `outputs`, and `difference` from the policy's own actions."""


class Policy(Protocol):
    """A policy that acts on observations: a torch `module`, and the `spec` of its observations and actions."""

    module: Any
    spec: Any

    def act(self, observations: Any, *, greedy: bool = True) -> Any:
        """Return actions [n, C, A] for n observations, arrays by name."""
        ...


LoadPolicy: TypeAlias = Callable[[Path, Any, str], Policy]
"""`load_policy(folder, config, device)`: a checkpoint with its run's configuration, or an exported folder and None.

`device` is as torch names it."""

Memory: TypeAlias = Callable[[Any, Mapping[str, "int | None"]], Sequence[ProcessForecast]]
"""`memory(config, world_sizes)`: the memory that the processes of a job will hold, one forecast a component.

A size of `world_sizes` that is None counts as 1. A ConfigError says that sizes are not known, such as those of weights
on another machine."""

PlacementNotes: TypeAlias = Callable[[Any, Mapping[str, Sequence[int]]], Sequence[str]]
"""`placement_notes(config, nodes)`: lines of `rlinf inspect placement` about what processes may hold on their nodes.

`nodes` is the rank of the node of each process, by component."""

FlowOf: TypeAlias = Callable[[Any], "JobFlow"]
"""`flow(config)`: the flow of a step's work between the components of a job, for advice on its placement."""

Inputs: TypeAlias = Callable[[Any], Sequence[Path]]
"""`inputs(config)`: files and folders that a run reads. A digest of their content is kept in its `environment.json`."""

Trials: TypeAlias = Callable[[Any], Sequence[Trial]]
"""`trials(config)`: the programs that `rlinf doctor` runs where components are placed."""


class Collect(Protocol):
    """`rlinf runs prune`: what runs left on this machine outside of their folders, and no process uses.

    `older_than` is seconds since it was used last, None the recipe's own choice; it is removed where `delete`.

    Returns:
        What each is, and its bytes.
    """

    def __call__(self, older_than: float | None, *, delete: bool) -> Sequence[tuple[str, int]]: ...


Convert: TypeAlias = Callable[[Path, Path], bool]
"""`convert(checkpoint, into)`, of `rlinf runs convert`: writes a checkpoint of an earlier version into an empty folder
as this version has it. Returns whether it was of an earlier version; if not, nothing was written."""


class Recipe(NamedTuple):
    """A kind of job that can be trained.

    A file selects it as `package.module:name`, or by the name under which a package offers it through the entry point
    group `rlinf.recipes`. A part that is None is one that the recipe does not have.

    Attributes:
        name: what `recipe: NAME` says in a file, and the first part of the names of its runs.
        summary: one line for `rlinf train`.
        config: the pydantic model of its whole file, or `module:Class`. It has the fields `recipe` and `cluster`.
        default_config: the config that `rlinf train recipe=NAME` starts from: the name of a shipped one, a YAML file
            beside the module that holds the recipe, or YAML of several lines.
        program: what `rlinf train` calls, a function or its name. The parts from `check` to `convert` are given the
            same way; the type of each says what it does.
        variants: recipes that a file of this one selects by a value, or by a text in it, as in `{"data.type=chat":
            "sft_chat", "data.train_data_paths=*.jsonl": "sft_chat"}`.
        training_data: keys, such as `data.train_data_paths`, whose files only training reads: `record`, `evaluate` and
            `play` do not need them.
        elastic: components that may continue with fewer processes while nodes are lost.
    """

    name: str
    summary: str
    config: type[BaseModel] | str
    default_config: str
    program: Program | str | None = None
    check: Check | str | None = None
    facts: Facts | str | None = None
    record: Record | str | None = None
    evaluate: Evaluate | str | None = None
    play: Play | str | None = None
    replay: Replay | str | None = None
    export: Export | str | None = None
    policy: LoadPolicy | str | None = None
    memory: Memory | str | None = None
    inputs: Inputs | str | None = None
    trials: Trials | str | None = None
    flow: FlowOf | str | None = None
    collect: Collect | str | None = None
    variants: Mapping[str, str] = MappingProxyType({})
    training_data: tuple[str, ...] = ()
    elastic: tuple[str, ...] = ()
    convert: Convert | str | None = None
    placement_notes: PlacementNotes | str | None = None

    @property
    def package(self) -> str:
        """The top-level package, or module, that the recipe is in."""
        module = self.config if isinstance(self.config, str) else self.config.__module__
        return module.partition(":")[0].partition(".")[0]

    def config_model(self) -> type[BaseModel]:
        """Return the model of the recipe's whole file.

        Raises:
            ConfigError: it cannot be imported.
        """
        return self._loaded(self.config)

    def load(self, part: P | str | None) -> P | None:
        """Return the function of a part, as in `recipe.load(recipe.program)`; None where the recipe does not have it.

        Raises:
            ConfigError: it cannot be imported.
        """
        return None if part is None else self._loaded(part)

    def _loaded(self, part: P | str) -> P:
        if not isinstance(part, str):
            return part
        module, _, name = part.partition(":")
        try:
            return cast("P", getattr(import_module(module), name))
        except Exception as error:
            message = f"recipe `{self.name}` cannot be loaded: {type(error).__name__}: {error}"
            help = "install missing packages, or fix the package that provides the recipe"
            raise ConfigError(message, why=f"it names `{part}`", help=help) from error


class Job(NamedTuple):
    """A loaded file, as far as it is valid.

    Attributes:
        name: the file's display name.
        diagnostics: all findings: errors, warnings and notes.
        tree: the composed configuration, with the source of each value; None if it could not be read.
        sources: the file, its bases, and the overrides if there are any.
        recipe: the selected recipe, or None.
        config: the recipe's model of the whole file, or None.
        cluster: the `cluster` section, or None.
        topology: its nodes, groups and units as declared or assumed, or None.
        resolutions: the resolution of each component: its rank map on that topology, if possible.
        world_sizes: the number of processes of each component; None if not known yet.
        view: the valid part of the file; None if it could not be read.
        secret: paths whose values must not be printed, besides those with secret-looking keys.

    If `ok` is False, these may be incomplete: invalid values are omitted.
    """

    name: str
    diagnostics: Diagnostics
    tree: MappingNode | None = None
    sources: tuple[SourceText, ...] = ()
    recipe: Recipe | None = None
    config: BaseModel | None = None
    cluster: ClusterConfig | None = None
    topology: ClusterTopology | None = None
    resolutions: Mapping[str, Resolution] = MappingProxyType({})
    world_sizes: Mapping[str, int | None] = MappingProxyType({})
    view: Validated[Any] | None = None
    secret: frozenset[KeyPath] = frozenset()

    def __repr__(self) -> str:
        # Not its fields: the tree has pages, and values that must not be printed.
        recipe = f"recipe {self.recipe.name}, " if self.recipe is not None else ""
        return f"<Job {self.name}: {recipe}{'valid' if self.ok else 'with errors'}>"

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return self.diagnostics.ok

    def raise_if_bad(self) -> None:
        """Raise the findings, as `rlinf validate` prints them, if one of them is an error.

        Raises:
            ConfigError: with every finding in its text.
        """
        if not self.ok:
            from rlinf_core.config.diagnostics import render_text

            raise ConfigError("\n".join(render_text(diagnostic) for diagnostic in self.diagnostics))
