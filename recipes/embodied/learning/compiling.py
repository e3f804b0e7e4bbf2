"""Compilation of a policy's training passes, `actor.model.compile`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

import torch
from torch import nn

from rlinf_core import ConfigError

_COMPILERS: Final = ("g++", "clang++")
_KEY: Final = "actor.model.compile"


def compile_training(policy: nn.Module, methods: Sequence[str], device: torch.device) -> None:
    """Have torch.compile compile `forward` and other methods of a policy, in place, when they are first called.

    Args:
        policy: the policy, as training calls it, sharded or not; the names of its weights remain.
        methods: those that training calls besides `forward`.
        device: where the policy is trained.

    Raises:
        ConfigError: this machine lacks a compiler.
    """
    missing = missing_compiler(device)
    if missing is not None:
        raise ConfigError(
            f"`{_KEY}: true` needs {missing[0]}, which this machine lacks",
            where=_KEY,
            help=f"{missing[1]}, or remove `{_KEY}`",
        )
    policy.compile()
    for name in methods:
        setattr(policy, name, torch.compile(getattr(policy, name)))


def missing_compiler(device: torch.device) -> tuple[str, str] | None:
    """Return what torch.compile lacks on this machine, and the remedy; None: nothing.

    Code for the host is compiled by C++; on GPUs by Triton, whose launchers are compiled by C.
    """
    named = os.environ.get("CXX")
    if not any(map(shutil.which, (named,) if named else _COMPILERS)):
        return f"a C++ compiler ({named or ' or '.join(_COMPILERS)})", "install one, as by `apt install g++`"
    if device.type != "cpu" and find_spec("triton") is None:
        return "the package triton", "`pip install triton`"
    return None
