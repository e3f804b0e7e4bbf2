"""Facts about environments before a run: their observations and limits, and whether they can be made at all.

Environments of our own and of Gymnasium are made once, in this process. Classes of a user's own, and modules in ids
such as `my_package:Slide-v0`, are only looked for, not imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from recipes.sections.imports import missing_module

if TYPE_CHECKING:
    from recipes.embodied.envs.env_spec import EnvSpec


class EnvFacts(NamedTuple):
    """Properties of an environment that other keys of a file have to fit.

    Attributes:
        has_states: its observations have `states`; None: not known.
        has_images: its observations have images of some camera; None: not known.
        max_episode_steps: its own limit; None: not known, or it has none.
        problem: why it cannot be made, if it cannot.
        help: what to do about that.
        spec: the spec of its observations and actions; None: not known, sizes that are not known: 0.
        control_hz: actions in a second; None: not known.
    """

    has_states: bool | None = None
    has_images: bool | None = None
    max_episode_steps: int | None = None
    problem: str | None = None
    help: str | None = None
    spec: EnvSpec | None = None
    control_hz: float | None = None


def env_facts(env_type: str, task: str, options: Mapping[str, Any]) -> EnvFacts:
    """Make an environment that is cheap to make, and return its description."""
    return _made(env_type, task, json.dumps(dict(options), sort_keys=True, default=str))


@lru_cache(maxsize=16)
def _made(env_type: str, task: str, options: str) -> EnvFacts:
    from recipes.embodied.envs.env_spec import EnvSettings
    from recipes.embodied.envs.registry import make_env
    from rlinf_core import ConfigError

    if task.rpartition(":")[0]:
        missing = missing_module(task)
        return EnvFacts(problem=None if missing is None else f"`{task}` cannot be made: {missing}")
    try:
        env = make_env(env_type, EnvSettings(num_envs=1, task=task, options=json.loads(options)))
    except ConfigError as error:
        return EnvFacts(problem=error.message, help=error.help)
    except Exception as error:  # noqa: BLE001 - a simulator may raise anything
        return EnvFacts(problem=f"`{task}` cannot be made: {type(error).__name__}: {error}")
    try:
        spec = env.spec
        limit, rate = env.max_episode_steps, env.control_hz
        return EnvFacts(spec.state_size > 0, bool(spec.cameras), limit, spec=spec, control_hz=rate)
    finally:
        env.close()
