"""Recipes: descriptions with import paths only, so that listing them is cheap, and lookup of installed ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from rlinf_core.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pydantic import BaseModel

ENTRY_POINT_GROUP: Final = "rlinf.recipes"
# The fields of a recipe that name a function.
Part: TypeAlias = (
    Literal["program", "check", "facts", "curve", "record", "evaluate", "policy"]
    | Literal["export", "play", "memory", "savings", "inputs", "trials"]
)


class Trial(NamedTuple):
    """A program that `rlinf doctor` runs where a component is placed, in the environment of its processes.

    The last line that it prints is a JSON object: `verdict` (`ok`, `warning` or `fault`), `what` was seen and `help`.

    Attributes:
        component: whose interpreter, variables and nodes they are.
        what: name of the check, as in `simulator`.
        module, arguments: what `python -m` runs.
        seconds: that it may take.
        each_process: whether a last argument follows, in JSON: a list of the variables that the component's processes
            on that node get from their places, as `WORLD_SIZE` and the one that says which accelerators they see.
    """

    component: str
    what: str
    module: str
    arguments: tuple[str, ...] = ()
    seconds: float = 120.0
    each_process: bool = False


class Recipe(NamedTuple):
    """A kind of job that can be trained. A package offers one through the entry point group `rlinf.recipes`.

    A function is named as `module:function`; None: the recipe has no such part.

    Attributes:
        name: what `recipe: NAME` says in a file.
        summary: one line for `rlinf recipes`.
        config: the pydantic model of its whole file, as `module:Class`. It has the fields `recipe` and `cluster`.
        default_config: the config that `rlinf train recipe=NAME` starts from: the name of a shipped one, or a YAML file
            beside the module that holds the recipe.
        program: `program(job, folder, listener)`, for `rlinf train`, with the checked job, the run's `RunFolder` and
            whoever is told of its events (`rlinf_core.runners.events`): runs to the end, or raises what failed once its
            workers are ended.
        check: `check(config, world_sizes, report)`: the rules that relate sections. `world_sizes` has the number of
            processes of each placed component, None where that cannot be known yet; `report` is a `Report`.
        facts: `facts(config)`: what a run must agree in to continue from a checkpoint, by the path of the key
            (`Manifest.facts`). A resume that does not fit is refused before anything is written; None: the program
            checks.
        curve: `curve(metrics_file, folder, title)`: draws the learning curve into the folder of a run that has ended;
            returns the pictures, or None where no metric to draw was written.
        record: `record(job, folder, *, episodes, checkpoint, successes_only, video, fps, tell)`, for `rlinf record`:
            writes demonstrations into a new folder and returns `folder`, `episodes`, `frames`, `tried` and `successes`.
        evaluate: `evaluate(job, checkpoint, folder, *, episodes, allow_training_starts, video, tell)`, for `rlinf
            eval`: writes `eval.json` into a new folder and returns its object.
        policy: `load(folder, config, device)`, for `load_policy`, with a checkpoint and the configuration of its run,
            or with a folder that was exported and None.
        export: `export(config, checkpoint, folder, kind)`, for `rlinf export`: writes a policy into a new folder in a
            format of that kind and returns what was written.
        play: `play(job, checkpoint, file, *, episodes, tell)`, for `rlinf play`: writes a video of episodes and returns
            how they went.
        memory: `memory(config, world_sizes)`: the memory that a job will hold, a list of
            `ProcessForecast`.
        savings: `savings(config)`: changes of the file that save memory, the nearest first, each a tuple of overrides.
        inputs: `inputs(config)`: the files and folders that a run reads, whose content is noted in its
            `environment.json`.
        trials: `trials(config)`: the programs that `rlinf doctor` runs where components are placed, a list of `Trial`.
        training_data: keys, such as `data.train_data_paths`, whose files only training reads: `record`, `evaluate` and
            `play` do not need them.
    """

    name: str
    summary: str
    config: str
    default_config: str
    program: str | None = None
    check: str | None = None
    facts: str | None = None
    curve: str | None = None
    record: str | None = None
    evaluate: str | None = None
    policy: str | None = None
    export: str | None = None
    play: str | None = None
    memory: str | None = None
    savings: str | None = None
    inputs: str | None = None
    trials: str | None = None
    training_data: tuple[str, ...] = ()

    def config_model(self) -> type[BaseModel]:
        """Return the model of the recipe's whole file.

        Raises:
            ConfigError: it cannot be imported.
        """
        return self._load(self.config)

    def function(self, part: Part) -> Callable[..., Any] | None:
        """Return the function of a part, or None. That of `program` imports torch and ray.

        Raises:
            ConfigError: it cannot be imported.
        """
        target: str | None = getattr(self, part)
        return None if target is None else self._load(target)

    def _load(self, target: str) -> Any:
        module, _, name = target.partition(":")
        try:
            return getattr(import_module(module), name)
        except Exception as error:
            raise ConfigError(
                f"recipe `{self.name}` cannot be loaded: {type(error).__name__}: {error}",
                why=f"it names `{target}`",
                help="install missing packages, or fix the package that provides the recipe",
            ) from error


class UnknownRecipeError(ConfigError):
    """No installed package provides a recipe of this name."""


def recipe_names() -> list[str]:
    """Return the names of all installed recipes, in alphabetical order. Imports none of them."""
    return sorted(_entry_points())


def find_recipe(name: str) -> Recipe:
    """Return the recipe called `name`.

    Raises:
        UnknownRecipeError: there is none; `help` suggests names.
        ConfigError: its package cannot be loaded.
    """
    points = _entry_points()
    point = points.get(name)
    if point is None:
        from rlinf_core.suggest import did_you_mean, quoted

        known = f"the recipes are {quoted(sorted(points))}" if points else "no installed package provides a recipe"
        raise UnknownRecipeError(f"there is no recipe `{name}`", help=did_you_mean(name, points) or known)
    try:
        recipe = point.load()
    except Exception as error:
        raise ConfigError(
            f"recipe `{name}` cannot be loaded: {type(error).__name__}: {error}",
            why=f"its entry point is `{point.value}`",
            help="fix or remove the package that provides it",
        ) from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"recipe `{name}` cannot be loaded: `{point.value}` is not a Recipe",
            help="fix or remove the package that provides it",
        )
    return _with_own_config(recipe, point.module)


def _with_own_config(recipe: Recipe, module: str) -> Recipe:
    """Return a recipe with the path of a config that is beside its module; other names stay."""
    if not recipe.default_config.endswith((".yaml", ".yml")):
        return recipe
    own = Path(str(sys.modules[module].__file__)).parent / recipe.default_config
    return recipe._replace(default_config=str(own)) if own.exists() else recipe


def _entry_points() -> dict[str, EntryPoint]:
    # Imported here: a file without `recipe` needs no recipes.
    from importlib.metadata import entry_points

    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        points.setdefault(point.name, point)
    return points
