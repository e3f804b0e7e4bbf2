"""Facts about engines that need no import: names, packages and limits."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from rlinf_core import ConfigError
from rlinf_core.process.requirements import install_command
from rlinf_core.scalars import problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """An engine by its name in `rollout.backend`.

    Attributes:
        name: the name, as written in files.
        modules: what the interpreter of the rollout workers must have besides torch and transformers.
        keys: the keys of `rollout` that it reads and others do not.
        keeps_partial: whether unfinished answers can continue under new weights, and aborted ones keep their tokens.
    """

    name: str
    modules: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()
    keeps_partial: bool = True


# Arguments of other engines that this project gives by itself: with other values tokens or log-probabilities are wrong.
RESERVED_OPTIONS: Final = {
    "vllm": frozenset(
        ("model", "dtype", "skip_tokenizer_init", "async_scheduling", "logprobs_mode", "tensor_parallel_size")
    ),
}
# The largest rank of an adapter that vLLM takes.
LARGEST_RANK: Final = 512
_GPU_KEYS: Final = frozenset(("tensor_parallel_size", "gpu_memory_utilization", "engine_options"))
# Copies of a prompt's tokens that storing it once must save: attention in two parts costs a small model some time.
MIN_SAVED: Final = 512
BACKENDS: Final = {
    "torch": Backend(name="torch"),
    "huggingface": Backend(name="torch"),
    "vllm": Backend(name="vllm", modules=("vllm",), keys=_GPU_KEYS),
    "server": Backend(name="server", modules=("httpx",), keys=frozenset(("server",)), keeps_partial=False),
}


def no_sglang(value: Any) -> Any:
    """Return the name of an engine.

    Raises:
        PydanticCustomError: it is that of an engine that was there once.
    """
    if value == "sglang":
        help = "write `vllm`, which reads the same keys, or `server` for a server that is running already"
        raise problem("bad-value", "SGLang is not an engine of this recipe any more", help=help)
    return value


def missing_package(module: str, why: str) -> ConfigError:
    """Return the error of an interpreter that lacks the package of an engine."""
    return ConfigError(
        f"`rollout.backend: {module}` needs the package {module} in the interpreter of every rollout worker",
        why=f"{sys.executable}: {why}",
        help=f"{install_command(module)}, or name an interpreter that has it for the node group of `rollout`:"
        " `env_configs: [{node_ranks: ..., python_interpreter_path: ...}]`",
    )


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's text, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
