"""The loading of a job from a file's name: the pipeline that commands and the runtime share.

    file -> compose (bases, overrides, references) -> validation -> cluster rules -> placement -> the recipe's rules

Every stage reports its findings and passes on the valid part, so that one run reports all. A configuration of an
earlier run may have keys that were removed since, and a resumed job gets the commits of its models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from rlinf_core.config.composing.compose import ANOTHER_FILE, compose, no_configuration
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.ranks import nodes_text
from rlinf_core.config.reading import decode, load_source
from rlinf_core.config.secrets import environment_secrets, secret_values
from rlinf_core.config.sections import group_rules, hardware_rules
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.config.sections.group_rules import Site
from rlinf_core.config.sections.hardware_rules import assumed
from rlinf_core.config.sections.values import hub_paths, unfetched
from rlinf_core.config.shipped import is_bare_name, meant_config, renamed_configs, shipped_configs, successor
from rlinf_core.config.tree import (
    Composed,
    MappingNode,
    Path,
    ScalarNode,
    SourceText,
    Span,
    find,
    naming,
    place,
    to_data,
)
from rlinf_core.config.validating.model_fields import Validated
from rlinf_core.config.validating.validation import ANY_ITEM, StandIns, validate
from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.hardware.robots import UNKNOWN_TYPE, hardware_types
from rlinf_core.job.earlier_run import commits_of_resumed, is_config_of_a_run, without_earlier_keys
from rlinf_core.job.find_recipe import UnknownRecipeError, find_recipe, find_variant, recipe_names, started_recipe
from rlinf_core.job.recipe import Job, Recipe
from rlinf_core.job.report import Report, check_elastic, check_placement
from rlinf_core.placement.resolve import Resolution
from rlinf_core.process.known_secrets import remember
from rlinf_core.suggest import near
from rlinf_core.topology import ClusterTopology, NodeInfo, accelerator_mismatches

Probe: TypeAlias = Callable[[ClusterConfig], Sequence[NodeInfo]]
"""A function that probes the nodes of a cluster, and returns them by rank; it raises if that fails."""

Rule: TypeAlias = Callable[[Site], None]
"""A function that reports mistakes in the `cluster` section."""


def _meant_type(written: str) -> str:
    """Return the type that a misspelt hardware type probably means, or the stand-in for unknown types."""
    return next(iter(near(written, hardware_types())), UNKNOWN_TYPE)


# The prefix of a job's name that means a recipe's default configuration, as in `recipe=embodied`.
FROM_RECIPE: Final = "recipe="
_ADDRESSES: Final = ("robot_ip", "left_robot_ip", "right_robot_ip")
_GROUP: Final[Path] = ("cluster", "node_groups", ANY_ITEM)
# Stand-ins for required values that are missing or wrong: rules never trust them (`Validated.damaged`), but need them
# to check the values beside them.
STAND_INS: Final[StandIns] = {
    ("cluster", "num_nodes"): 1,
    (*_GROUP, "label"): "?",
    (*_GROUP, "node_ranks"): "all",
    (*_GROUP, "env_configs", ANY_ITEM, "node_ranks"): "all",
    (*_GROUP, "hardware", "configs", ANY_ITEM, "node_rank"): 0,
    (*_GROUP, "hardware", "type"): _meant_type,
    **{(*_GROUP, "hardware", "configs", ANY_ITEM, name): "10.10.10.1" for name in _ADDRESSES},
}


class ClusterFile(BaseModel):
    """A file that selects no recipe: only its `cluster` section is known."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    cluster: ClusterConfig = Field(description="The machines, and the placement of components.")


def load_job(
    name: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    assume: Sequence[str] = (),
    stdin: bytes | None = None,
    environ: Mapping[str, str] | None = None,
    probe: Probe | None = None,
    rules: Sequence[Rule] = (),
) -> Job:
    """Read and check a configuration; only `probe` connects to machines. A file's content never makes it raise.

    Args:
        name: a file, the name of a shipped configuration, `-` for standard input, or `recipe=NAME` for the
            configuration that a recipe starts from.
        overrides: `key=value` and `~key` arguments.
        assume: `--assume` arguments, `[GROUP=]N[xMODEL]`: accelerators of nodes that are not probed.
        stdin: replaces the process's standard input.
        environ: the environment for `${env:NAME}`; by default the process's own.
        probe: called to probe the nodes if the file is valid, which is then checked against the results.
        rules: additional rules for the `cluster` section, such as those for `rlinf up`.

    Raises:
        ConfigError: `recipe=NAME` names no recipe, or one that cannot be loaded.
    """
    name = os.fspath(name)
    if name.startswith(FROM_RECIPE):
        # The override also selects the recipe, since recipes may share a default config.
        overrides = (name, *overrides)
    diagnostics = Diagnostics()
    source = _load_source(name, overrides, stdin, diagnostics)
    if source is None:
        return Job(name, diagnostics)

    def understood(overrides: Sequence[str], diagnostics: Diagnostics) -> Job:
        composed = compose(
            source,
            overrides,
            diagnostics,
            environ=os.environ if environ is None else environ,
            without_recipe="cluster",
        )
        if composed is None:
            return Job(source.name, diagnostics)
        if (why := no_configuration(composed.tree)) is not None:
            place = Span(SourceText(source.name, "", source.kind), 0, 0)
            diagnostics.error("not-a-mapping", f"this {why}", place, help=ANOTHER_FILE)
            return Job(source.name, diagnostics)
        job = Job(source.name, diagnostics, composed.tree, composed.sources, secret=composed.secret)
        return _understand(job, composed, assume, probe, rules)

    first = Diagnostics()
    first.extend(diagnostics)
    job = understood(overrides, diagnostics)
    pins = commits_of_resumed(job)
    return understood((*overrides, *pins), first) if pins else job


def _load_source(
    name: str, overrides: Sequence[str], stdin: bytes | None, diagnostics: Diagnostics
) -> SourceText | None:
    if name.startswith(FROM_RECIPE):
        start = started_recipe(name.removeprefix(FROM_RECIPE), overrides).default_config
        if "\n" in start:
            return decode(name, start.encode(), diagnostics, "stdin")
        name = start
    shipped = meant_config(name)
    if shipped is not None:
        return load_source(str(shipped), diagnostics)
    findings = Diagnostics()
    source = load_source(name, findings, stdin=stdin)
    if source is None and name != "-" and not os.path.exists(name):
        hint = _similar_job(name)
        diagnostics.extend(finding._replace(help=hint or finding.help) for finding in findings)
    else:
        diagnostics.extend(findings)
    return source


def _similar_job(name: str) -> str | None:
    """Return a hint on the shipped configuration or recipe that a name or file name may mean, or None."""
    wanted = name.removesuffix(".yaml").removesuffix(".yml")
    if now := successor(wanted):
        return f"it is no longer shipped: write `{now}`"
    # The last part of a name, such as `sums-laptop`, also finds it.
    last_parts = {shipped.rpartition("/")[2]: shipped for shipped in reversed(shipped_configs())}
    meant = {**last_parts, **renamed_configs(), **{name: name for name in (*recipe_names(), *shipped_configs())}}
    folder = wanted.rpartition("/")[0]
    is_name = not folder or any(shipped.startswith(f"{folder}/") for shipped in shipped_configs())
    if is_name and (similar := near(wanted, meant)):
        return f"did you mean `{meant[similar[0]]}`?"
    return "`rlinf train` lists the recipes and their configs" if is_bare_name(name) else None


def _understand(job: Job, composed: Composed, assume: Sequence[str], probe: Probe | None, rules: Sequence[Rule]) -> Job:
    diagnostics = job.diagnostics
    selected = _select_recipe(composed, diagnostics)
    model = selected.model if selected else ClusterFile
    if selected and is_config_of_a_run(job.name):
        findings = Diagnostics()
        composed = validate(model, composed, findings, stand_ins=STAND_INS).composed
        composed = without_earlier_keys(composed, model, findings, diagnostics)
    view: Validated[Any] = validate(model, composed, diagnostics, stand_ins=STAND_INS)
    composed = view.composed
    # From here on, any text may quote values of the file, such as errors or worker output, so secrets are registered.
    remember((*environment_secrets(), *secret_values(composed.tree, composed.secret)))
    config: BaseModel | None = view.model if selected else None
    if view.model is None and selected:
        # A required value elsewhere is wrong, but the cluster can still be checked. Its mistakes are reported already.
        view = validate(ClusterFile, composed, Diagnostics(), stand_ins=STAND_INS)
    if selected and not selected.mistyped:
        job = job._replace(recipe=selected.recipe, partial_config=config, is_whole=diagnostics.ok)
    job = job._replace(tree=composed.tree, secret=composed.secret, view=view)
    if not isinstance(cluster := getattr(view.model, "cluster", None), ClusterConfig):
        return job
    check_cluster(cluster, view, diagnostics, rules)
    topology = _topology(cluster, assume, diagnostics)
    offline = Diagnostics()
    resolutions = check_placement(view, cluster, topology, offline)
    probed: ClusterTopology | None = None
    if probe is not None and diagnostics.ok and offline.ok:
        probed = _probed(cluster, probe(cluster), composed.tree, diagnostics)
    if probed is None:
        diagnostics.extend(offline)
    else:
        topology = probed
        resolutions = check_placement(view, cluster, topology, diagnostics)
    sizes = _world_sizes(cluster, resolutions, view)
    if selected and config is not None:
        _check_hub_names(config, view, diagnostics)
        _check_recipe(selected.recipe, config, view, sizes, diagnostics)
    damaged = view.damaged(("cluster", "num_nodes"))
    return job._replace(
        cluster=cluster, topology=None if damaged else topology, resolutions=resolutions, world_sizes=sizes
    )


class _Selected(NamedTuple):
    """A recipe and the model of its file; `mistyped` if the file misspells its name."""

    recipe: Recipe
    model: type[BaseModel]
    mistyped: bool = False


def _select_recipe(composed: Composed, diagnostics: Diagnostics) -> _Selected | None:
    tree = composed.tree
    entry = tree.entry("recipe")
    if entry is None:
        return None
    if ("recipe",) in composed.unresolved:
        return None
    if not isinstance(entry.value, ScalarNode) or not entry.value.raw:
        message = "`recipe` must be the name of a recipe"
        diagnostics.error("unknown-recipe", message, entry.key.span, ("recipe",))
        return None

    def written(key: str) -> object:
        node = find(tree, tuple(key.split(".")))
        return node.raw if isinstance(node, ScalarNode) else None if node is None else to_data(node)

    try:
        recipe = find_variant(entry.value.raw, written)
        return _Selected(recipe, recipe.config_model())
    except ConfigError as error:
        unknown = isinstance(error, UnknownRecipeError)
        code = "unknown-recipe" if unknown else "broken-recipe"
        span = entry.value.span
        diagnostics.error(code, error.message, span, ("recipe",), error.help)
    return _meant_recipe(entry.value.raw) if unknown else None


def _meant_recipe(name: str) -> _Selected | None:
    for meant in near(name, recipe_names()):
        with suppress(ConfigError):
            recipe = find_recipe(meant)
            return _Selected(recipe, recipe.config_model(), mistyped=True)
    return None


def _topology(cluster: ClusterConfig, assume: Sequence[str], diagnostics: Diagnostics) -> ClusterTopology:
    arguments = SourceText("--assume", "\n".join(assume), "overrides")
    sound: list[str] = []
    start = 0
    for text in assume:
        try:
            assumed(text, cluster)
            sound.append(text)
        except RLinfError as error:
            span = Span(arguments, start, start + len(text))
            diagnostics.error("bad-assumption", error.message, span, (), error.help)
        start += len(text) + 1
    return ClusterTopology.from_config(cluster, sound)


def _probed(
    cluster: ClusterConfig, nodes: Sequence[NodeInfo], tree: MappingNode, diagnostics: Diagnostics
) -> ClusterTopology | None:
    """Return the topology of the probed nodes; None after reporting differences from the declaration."""
    mismatches = accelerator_mismatches(cluster, nodes)
    if not mismatches:
        return ClusterTopology.from_nodes(nodes, cluster)
    for index, group in enumerate(cluster.node_groups):
        own = [mismatch for mismatch in mismatches if mismatch.label == group.label]
        if not own:
            continue
        ranks: dict[str, list[int]] = {}
        for mismatch in own:
            ranks.setdefault(mismatch.found, []).append(mismatch.node_rank)
        differences = [f"found {what} on {nodes_text(on)}" for what, on in ranks.items()]
        message = ", ".join((f"group `{group.label}` declares {own[0].declared}", *differences))
        path: Path = ("cluster", "node_groups", index, "accelerators")
        help = "fix the node, or correct `accelerators` of the group"
        diagnostics.error("accelerators-differ", message, naming(tree, path), path, help)
    return None


def _world_sizes(
    cluster: ClusterConfig, resolutions: Mapping[str, Resolution], view: Validated[Any]
) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {}
    doubtful = view.damaged(("cluster", "num_nodes")) or view.damaged(("cluster", "node_groups"))
    for name, entry in cluster.component_placement.items():
        resolution = resolutions.get(name)
        if doubtful or resolution is None or resolution.problems:
            sizes[name] = None
            continue
        open_end = resolution.selection is None and any(part.resources is None for part in entry.rank_map.parts)
        sizes[name] = None if open_end else resolution.world_size
    return sizes


def _check_hub_names(config: BaseModel, view: Validated[Any], diagnostics: Diagnostics) -> None:
    """Report names of models and data sets that a run would fetch, or cannot fetch."""
    for at, path in hub_paths(config):
        absent = unfetched(path)
        if absent is not None:
            # On a cluster, the machine that uses a commit may have it even if this one does not.
            elsewhere = path.commit is not None and view.model is not None and view.model.cluster.num_nodes > 1
            severity = Severity.ERROR if absent.is_fault and not elsewhere else Severity.NOTE
            where = place(view.tree, at)
            diagnostics.add(Diagnostic("hub-name", severity, absent.message, where, view.original(at), absent.help))


def _check_recipe(
    recipe: Recipe,
    config: BaseModel,
    view: Validated[Any],
    world_sizes: Mapping[str, int | None],
    diagnostics: Diagnostics,
) -> None:
    with rules_of(recipe, view, diagnostics):
        check = recipe.load(recipe.check)
        if check is not None:
            check(config, world_sizes, Report(view, diagnostics))
    check_elastic(recipe.name, recipe.elastic, config, Report(view, diagnostics))


@contextmanager
def rules_of(recipe: Recipe, view: Validated[Any], diagnostics: Diagnostics) -> Generator[None, None, None]:
    """Report an exception of a recipe's rules, which may be user code.

    Raises:
        RLinfError: there is too little memory.
    """
    try:
        yield
    except MemoryError:
        message = "this machine has too little memory for the files that the job names"
        raise RLinfError(message, help="check the job where it will run") from None
    except Exception as error:  # noqa: BLE001  the finding holds the error
        message = f"the rules of recipe `{recipe.name}` failed: {type(error).__name__}: {error}"
        span = Span(view.tree.span.source, 0, 0)
        help_text = "fix the package that provides the recipe"
        diagnostics.error("broken-recipe", message, span, ("recipe",), help_text)


def check_cluster(
    cluster: ClusterConfig, view: Validated[Any], diagnostics: Diagnostics, rules: Sequence[Rule] = ()
) -> None:
    """Report every contradiction within the section, with additional `rules`; `view` is the validated file."""
    site = Site(cluster, view, diagnostics)
    for check in (group_rules.check, hardware_rules.check, *rules):
        check(site)
