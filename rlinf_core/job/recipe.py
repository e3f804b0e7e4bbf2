"""Recipes, their parts, and the jobs that select them.

A part is a function, or its name `module:function`, which is imported when needed, so that listing recipes and checking
a file import nothing heavy. Each part has a type here, which documents its arguments and result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from rlinf_core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rlinf_core.config.diagnostics import Diagnostics
    from rlinf_core.config.model import WorldSizes
    from rlinf_core.config.sections.cluster import ClusterConfig
    from rlinf_core.config.tree import MappingNode, SourceText
    from rlinf_core.config.tree import Path as KeyPath
    from rlinf_core.config.validating.model_fields import Validated
    from rlinf_core.job.flow import JobFlow
    from rlinf_core.job.report import Report
    from rlinf_core.placement.resolve import Resolution
    from rlinf_core.topology import ClusterTopology


# Parts that move to the host while a process offloads, and all parts that are in an accelerator's memory.
_RESIDENT: Final = ("weights", "optimizer", "critics")
DEVICE_PARTS: Final = (
    *(*_RESIDENT, "gradients", "activations", "advantages", "batch", "merged adapter", "keys and values"),
    *("gathered weights", "gathered gradients"),
)
# Bytes of host memory for CUDA's libraries and context in a process with an accelerator. On an H200 with torch 2.11 an
# inference backend took 1.5 GiB, and a trainer that compiles kernels 2.2 GiB.
ACCELERATOR_LIBRARIES: Final = 3 << 29


class ProcessForecast(NamedTuple):
    """An estimate of the peak memory of a component's processes, the same for each.

    Attributes:
        component: the component of the job.
        processes: the number of processes.
        parts: bytes by part: `base` (interpreter and libraries), `weights`, `gradients`, ...
        shared: the maximum bytes of shared memory (/dev/shm) for its messages, over all processes.
        offloads: whether a process frees its accelerator's memory while other components use it.
        notes: the unknowns of the estimate.
        on_accelerator: bytes of the parts whose size differs on an accelerator.
    """

    component: str
    processes: int
    parts: Mapping[str, int]
    shared: int = 0
    offloads: bool = False
    notes: tuple[str, ...] = ()
    on_accelerator: Mapping[str, int] = MappingProxyType({})

    def parts_of(self, *, accelerated: bool) -> dict[str, int]:
        """Return the parts of a process with or without an accelerator."""
        return {**self.parts, **self.on_accelerator} if accelerated else dict(self.parts)

    def held(self, *, accelerated: bool) -> tuple[int, int]:
        """Return the bytes of host and accelerator memory of a process with or without an accelerator."""
        parts = self.parts_of(accelerated=accelerated)
        host = sum(parts.values())
        if not accelerated:
            return host, 0
        device = sum(parts.get(name, 0) for name in DEVICE_PARTS)
        # Weights are loaded on the host first, and so take host memory even without offloading.
        waiting = _RESIDENT if self.offloads else _RESIDENT[:1]
        stays = ACCELERATOR_LIBRARIES + sum(parts.get(name, 0) for name in waiting)
        return host - device + stays, device


P = TypeVar("P")
Fact: TypeAlias = "str | int | float | bool | None"
Emit: TypeAlias = Callable[[str], None]
"""A function that shows the user a line of progress."""


class Trial(NamedTuple):
    """A program that `rlinf doctor` runs where a component is placed, in the environment of its processes.

    Its last line of output is a JSON object with `verdict` (`ok`, `warning` or `fault`), `what` (the observation) and
    `help`.

    Attributes:
        component: the component whose interpreter, variables and nodes it uses.
        what: the name of the check, as in `simulator`.
        module, arguments: the module for `python -m` and its arguments.
        seconds: the time limit.
        each_process: whether to append a JSON argument: a list of the variables that the component's processes on that
            node get from their placement, such as `WORLD_SIZE` and the accelerators' visibility variable.
    """

    component: str
    what: str
    module: str
    arguments: tuple[str, ...] = ()
    seconds: float = 120.0
    each_process: bool = False


Program: TypeAlias = Callable[["Job", Any, Callable[[Any], None]], None]
"""`program(job, folder, listener)`, of `rlinf train`: runs the job to its end; after its workers end, raises a failure.

`folder` is the run's `RunFolder`; `listener` is called with the run's events (`rlinf_core.runners.events`)."""

Check: TypeAlias = Callable[[Any, "WorldSizes", "Report"], None]
"""`check(config, world_sizes, report)`, the rules between sections: reports contradictions.

`config` is the validated file, `world_sizes` the number of processes of each placed component, None if not known
yet."""

Facts: TypeAlias = Callable[[Any], Mapping[str, Fact]]
"""`facts(config)`: the values that a run must share with the checkpoint that it resumes, by the path of the key.

A mismatch is reported before anything is written."""


class Record(Protocol):
    """`rlinf record`: writes demonstrations into a new folder.

    With `device`, a person acts, or corrects the policy of `checkpoint`; with neither, the environment's expert acts.
    `fps` is rows per second; None: one row per action of the environment.

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
    """`rlinf eval`: writes `eval.json` into a new folder and returns its object; `episodes` defaults to the file's."""

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
    """`rlinf eval --play`: writes a video of episodes into `file` and returns their results: `file` and `episodes`."""

    def __call__(self, job: Job, checkpoint: Path, file: Path, *, episodes: int, emit: Emit) -> Mapping[str, Any]: ...


class Replay(Protocol):
    """`rlinf why --replay`: repeats a `QuarantinedItem`, an item that killed processes, in a separate process.

    Returns:
        The cause of the process's death in words; empty if it survived.
    """

    def __call__(self, job: Job, item: Any, *, emit: Emit) -> str: ...


Export: TypeAlias = Callable[[Any, Path, Path, str], Mapping[str, Any]]
"""`export(config, checkpoint, folder, kind)`, of `rlinf export`: writes a policy into a new folder in the format
`kind`. Returns `folder`, `files`, `inputs`, `outputs`, and `difference` from the policy's own actions."""


class Policy(Protocol):
    """A policy that acts on observations: a torch `module`, and the `spec` of its observations and actions."""

    module: Any
    spec: Any

    def act(self, observations: Any, *, greedy: bool = True) -> Any:
        """Return actions [n, C, A] for n observations, which are arrays by name."""
        ...


LoadPolicy: TypeAlias = Callable[[Path, Any, str], Policy]
"""`load_policy(folder, config, device)`: loads a checkpoint with its run's configuration, or an exported folder with
None. `device` is a device name of torch."""

Memory: TypeAlias = Callable[[Any, Mapping[str, "int | None"]], Sequence[ProcessForecast]]
"""`memory(config, world_sizes)`: estimates the memory of a job's processes, one forecast per component.

None in `world_sizes` counts as 1. It raises ConfigError if sizes are unknown, such as those of weights on another
machine."""

PlacementNotes: TypeAlias = Callable[[Any, Mapping[str, Sequence[int]]], Sequence[str]]
"""`placement_notes(config, nodes)`: lines of `rlinf inspect placement` about the resources of processes on their nodes.

`nodes` holds the node rank of each process, by component."""

FlowOf: TypeAlias = Callable[[Any], "JobFlow"]
"""`flow(config)`: the flow of a step's work between the components of a job, for advice on its placement."""

Inputs: TypeAlias = Callable[[Any], Sequence[Path]]
"""`inputs(config)`: files and folders that a run reads. Its `environment.json` keeps a digest of their content."""

Trials: TypeAlias = Callable[[Any], Sequence[Trial]]
"""`trials(config)`: the programs that `rlinf doctor` runs where components are placed."""


class Collect(Protocol):
    """`rlinf runs prune`: finds unused leftovers of runs on this machine outside their folders; deletes on `delete`.

    `older_than` is the seconds since the last use, or None for the recipe's default.

    Returns:
        A description and the bytes of each.
    """

    def __call__(self, older_than: float | None, *, delete: bool) -> Sequence[tuple[str, int]]: ...


Convert: TypeAlias = Callable[[Path, Path], bool]
"""`convert(checkpoint, into)`, of `rlinf runs convert`: writes a checkpoint of an earlier version into an empty folder
in this version's format. Returns whether it was of an earlier version; if not, nothing was written."""


class Recipe(NamedTuple):
    """A kind of job that can be trained.

    A file selects it as `package.module:name`, or by the name under which a package offers it through the entry point
    group `rlinf.recipes`. The recipe lacks the parts that are None.

    Attributes:
        name: the name in `recipe: NAME`, and the first part of the names of its runs.
        summary: one line for `rlinf train`.
        config: the pydantic model of its whole file, or `module:Class`. It has the fields `recipe` and `cluster`.
        default_config: the config that `rlinf train recipe=NAME` starts from: the name of a shipped config, a YAML file
            beside the recipe's module, or YAML of several lines.
        program: the function that `rlinf train` calls, or its name. The parts from `check` to `convert` are given the
            same way; the type of each says what it does.
        variants: recipes that a file of this recipe selects by a value, or a text in it, as in `{"data.type=chat":
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
        """The top-level package or module of the recipe's configuration model."""
        module = self.config if isinstance(self.config, str) else self.config.__module__
        return module.partition(":")[0].partition(".")[0]

    def config_model(self) -> type[BaseModel]:
        """Return the model of the recipe's whole file.

        Raises:
            ConfigError: the model cannot be imported.
        """
        return self._loaded(self.config)

    def load(self, part: P | str | None) -> P | None:
        """Return the function of a part, as in `recipe.load(recipe.program)`; None if the recipe lacks it.

        Raises:
            ConfigError: the function cannot be imported.
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
    """A loaded file, and its valid parts.

    Attributes:
        name: the file's display name.
        diagnostics: all findings: errors, warnings and notes.
        tree: the composed configuration, with the source of each value; None if it could not be read.
        sources: the file, its bases, and the overrides, if any.
        recipe: the selected recipe, or None.
        partial_config: the recipe's model of the whole file, or None; `is_whole` if no value of the file is omitted.
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
    partial_config: BaseModel | None = None
    is_whole: bool = False
    cluster: ClusterConfig | None = None
    topology: ClusterTopology | None = None
    resolutions: Mapping[str, Resolution] = MappingProxyType({})
    world_sizes: Mapping[str, int | None] = MappingProxyType({})
    view: Validated[Any] | None = None
    secret: frozenset[KeyPath] = frozenset()

    def __repr__(self) -> str:
        # The fields are omitted: the tree is long, and may hold secrets.
        recipe = f"recipe {self.recipe.name}, " if self.recipe is not None else ""
        return f"<Job {self.name}: {recipe}{'valid' if self.ok else 'with errors'}>"

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return self.diagnostics.ok

    @property
    def config(self) -> BaseModel | None:
        """`partial_config`; raises like `raise_if_bad` if values of the file are omitted, and so would be defaults."""
        if not self.is_whole:
            self.raise_if_bad()
        return self.partial_config

    def raise_if_bad(self) -> None:
        """Raise the findings, as `rlinf validate` prints them, if one of them is an error.

        Raises:
            ConfigError: a finding is an error; the text has every finding.
        """
        if not self.ok:
            from rlinf_core.config.diagnostics import render_text

            raise ConfigError("\n".join(render_text(diagnostic) for diagnostic in self.diagnostics))
