"""Facts about environments before a run: their observations and limits, and whether they can be made at all.

Environments of Gymnasium are made once, in this process. Classes of a user's own are only looked for, not imported.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class EnvFacts(NamedTuple):
    """Properties of an environment that other keys of a file have to fit.

    Attributes:
        has_states: its observations have `states`; None: not known.
        has_images: its observations have `images`; None: not known.
        max_episode_steps: its own limit; None: not known, or it has none.
        problem: why it cannot be made, if it cannot.
        help: what to do about that.
    """

    has_states: bool | None = None
    has_images: bool | None = None
    max_episode_steps: int | None = None
    problem: str | None = None
    help: str | None = None


def env_facts(env_type: str, task: str, options: Mapping[str, Any]) -> EnvFacts:
    """Make an environment of Gymnasium or panda-gym, and return what it says of itself."""
    return _made(env_type, task, json.dumps(dict(options), sort_keys=True, default=str))


@lru_cache(maxsize=16)
def _made(env_type: str, task: str, options: str) -> EnvFacts:
    from recipes.embodied.envs.base import EnvSettings
    from recipes.embodied.envs.registry import make_env
    from rlinf_core.errors import ConfigError

    try:
        env = make_env(env_type, EnvSettings(num_envs=1, task=task, options=json.loads(options)))
    except ConfigError as error:
        return EnvFacts(problem=error.message, help=error.help)
    except Exception as error:  # noqa: BLE001 - a simulator may raise anything
        return EnvFacts(problem=f"`{task}` cannot be made: {type(error).__name__}: {error}")
    try:
        spec = env.spec
        return EnvFacts(spec.state_size > 0, spec.image_shape is not None, env.max_episode_steps)
    finally:
        env.close()


def missing_module(target: str) -> str | None:
    """Return why the module of `package.module:name` cannot be found here, or None if it is there."""
    module = target.partition(":")[0]
    try:
        if find_spec(module) is not None:
            return None
    except Exception as error:  # noqa: BLE001 - packages around the module are imported, and may raise anything
        return f"{type(error).__name__}: {error}"
    return f"there is no module `{module}`"


def missing_name(target: str) -> str | None:
    """Return why the module of `package.module:name` has nothing of that name, or None if it may have it.

    The module is read and not imported: that may take seconds, or do anything.
    """
    module, _, name = target.partition(":")
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except SyntaxError as error:
        return f"line {error.lineno} of {spec.origin} is no Python: {error.msg}"
    except (OSError, ValueError):
        return None
    names = set(_bound(tree.body))
    return None if name in names or "*" in names or "__getattr__" in names else f"{spec.origin} defines no `{name}`"


def _bound(statements: list[ast.stmt]) -> Iterator[str]:
    """Return the names that statements of a module bind, those in branches included."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.alias):
                yield node.asname or node.name.partition(".")[0]
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
