"""The facts about engines that can be known without importing them: names, packages, and what they cannot do."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from rlinf_core.errors import ConfigError
from rlinf_core.requirements import install_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """An engine by the name that `rollout.backend` gives it.

    Attributes:
        name: as written in files.
        modules: what the interpreter of the rollout workers must have besides torch and transformers.
        has_own_weights: whether the engine lives in the rollout worker, which gives it new weights.
        keeps_partial: whether unfinished answers can go on under new weights.
        bounds_tokens: whether `rollout.max_running_tokens` is obeyed.
    """

    name: str
    modules: tuple[str, ...] = ()
    has_own_weights: bool = True
    keeps_partial: bool = True
    bounds_tokens: bool = True


BACKENDS: Final = {
    "torch": Backend(name="torch"),
    "huggingface": Backend(name="torch"),
    "vllm": Backend(name="vllm", modules=("vllm",)),
    "sglang": Backend(name="sglang", modules=("sglang",), keeps_partial=False),
    "server": Backend(name="server", has_own_weights=False, keeps_partial=False),
}


def missing_package(module: str, why: str) -> ConfigError:
    """Return the error of an interpreter that lacks the package of an engine."""
    return ConfigError(
        f"`rollout.backend: {module}` needs the package {module} in the interpreter of every rollout worker",
        why=f"{sys.executable}: {why}",
        help=f"{install_command(module)}, or give the node group of `rollout` an interpreter that has it:"
        " `env_configs: [{node_ranks: ..., python_interpreter_path: ...}]`",
    )
