"""The configurations that come with rlinf, by bare name: `hetero18` is `configs/hetero18.yaml` of the installation."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

# Beside this package, both in a checkout and in a wheel.
_FOLDER: Final = Path(__file__).parents[2] / "configs"
# Names of earlier releases, and what to start instead.
_FORMER: Final = {
    "libero_8gpu": "collocated",
    "libero_disaggregated": "disaggregated",
    "math_ppo_vllm": "math_grpo_8gpu algorithm.adv_type=gae",
    "serve_smollm": "serve_laptop actor.model.model_path=FOLDER",
    "sft_chat_smollm": "sft_chat_laptop actor.model.model_path=FOLDER",
}


@cache
def shipped_configs() -> dict[str, Path]:
    """Return every shipped configuration by its name, in alphabetical order."""
    walk = os.walk(_FOLDER)
    files = (Path(folder, name) for folder, _, names in walk for name in names if name.endswith(".yaml"))
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def shipped_config(name: str) -> Path | None:
    """Return the shipped configuration called `name`, or None."""
    return shipped_configs().get(name)


def is_shipped(file: str) -> bool:
    """Return whether a file, by its path, is a shipped configuration."""
    return Path(file) in shipped_configs().values()


def successor(name: str) -> str | None:
    """Return what to write after `rlinf train` in place of a configuration of an earlier release, or None."""
    return _FORMER.get(name)


def meant_config(name: str) -> Path | None:
    """Return the shipped configuration that a job's name means: a file of the same name comes first, a folder is no
    job."""
    is_file = os.path.exists(name) and not os.path.isdir(name)
    return shipped_config(name) if is_bare_name(name) and not is_file else None


def is_bare_name(name: str) -> bool:
    """Return whether `name` could be a shipped configuration's: no folder, no extension."""
    return bool(name) and os.path.basename(name) == name and "." not in name and name != "-"
