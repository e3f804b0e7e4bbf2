"""The configurations that come with rlinf, by name: `math/sums-laptop` is `configs/math/sums-laptop.yaml` of the
installation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    pass


# Beside this package, both in a checkout and in a wheel.
_FOLDER: Final = FilePath(__file__).parents[2] / "configs"
# Names of the previous release, which the next release will not accept.
_RENAMED: Final[Mapping[str, str]] = {
    "agent_calculator": "agent/calculator-laptop",
    "agent_framework": "agent/pydantic-ai-laptop",
    "agent_hetero": "agent/search-16nodes",
    "agent_search": "agent/search-laptop",
    "cartpole": "embodied/cartpole-laptop",
    "collocated": "embodied/libero-collocated-8gpu",
    "disaggregated": "embodied/libero-disaggregated-8gpu",
    "distill_laptop": "math/sums-distill-laptop",
    "franka_hil": "embodied/franka-hil-2arms",
    "franka_pick": "embodied/franka-pick-laptop",
    "franka_place": "embodied/franka-place-laptop",
    "franka_real": "embodied/franka-rlpd-1arm",
    "franka_rlpd_sim": "embodied/franka-rlpd-laptop",
    "franka_vision_pi05": "embodied/franka-pi05-laptop",
    "franka_vision_ppo": "embodied/franka-vla-laptop",
    "franka_vision_sft": "sft/franka-vla-laptop",
    "gymnasium_ppo": "embodied/gymnasium-ppo-laptop",
    "gymnasium_sac": "embodied/gymnasium-sac-laptop",
    "gymnasium_td3": "embodied/gymnasium-td3-laptop",
    "hybrid": "embodied/libero-hybrid-8gpu",
    "laptop": "embodied/pick-laptop",
    "laptop_grpo": "embodied/pick-grpo-laptop",
    "lerobot_act": "sft/lerobot-act-1gpu",
    "libero_4090_a800": "embodied/libero-4090-a800",
    "libero_pi0_ppo": "embodied/libero-pi0-1gpu",
    "libero_sft": "sft/libero-1node",
    "libero_spatial_ppo": "embodied/libero-cnn-1node",
    "maniskill_ppo": "embodied/maniskill-pick-1gpu",
    "math_32b_8node": "math/32b-64gpu",
    "math_async_disaggregated": "math/async-80gpu",
    "math_eval": "math/eval",
    "math_grpo_8gpu": "math/grpo-8gpu",
    "math_gsm8k": "math/gsm8k-1gpu",
    "math_laptop": "math/sums-laptop",
    "math_laptop_ppo": "math/sums-ppo-laptop",
    "math_moe_8gpu": "math/moe-8gpu",
    "math_smollm": "math/smollm2-laptop",
    "metaworld_dsrl": "embodied/metaworld-dsrl-laptop",
    "metaworld_press_ppo": "embodied/metaworld-press-laptop",
    "metaworld_press_sft": "sft/metaworld-press-laptop",
    "metaworld_reach_ppo": "embodied/metaworld-reach-laptop",
    "serve_laptop": "serve/sums-laptop",
    "sft_chat_laptop": "sft/sums-chat-laptop",
    "sft_laptop": "sft/pick-laptop",
    "smolvla_sft_rl": "embodied/libero-smolvla-1gpu",
    "success_classifier": "sft/success-classifier-laptop",
}
# Configurations that are no longer shipped, and the arguments of `rlinf train` that replace them.
_WITHDRAWN: Final[Mapping[str, str]] = {
    "libero_8gpu": "embodied/libero-collocated-8gpu",
    "libero_disaggregated": "embodied/libero-disaggregated-8gpu",
    "math_ppo_vllm": "math/grpo-8gpu algorithm.adv_type=gae",
    "serve_smollm": "serve/sums-laptop actor.model.model_path=FOLDER",
    "sft_chat_smollm": "sft/sums-chat-laptop actor.model.model_path=FOLDER",
}


@cache
def shipped_configs() -> dict[str, FilePath]:
    """Return every shipped configuration by its name, in alphabetical order."""
    files = {file.relative_to(_FOLDER).with_suffix("").as_posix(): file for file in _FOLDER.rglob("*.yaml")}
    return dict(sorted(files.items()))


def shipped_config(name: str) -> FilePath | None:
    """Return the shipped configuration called `name`, now or in the previous release, or None."""
    return shipped_configs().get(_RENAMED.get(name, name))


def is_shipped(file: str) -> bool:
    """Return whether a file, by its path, is a shipped configuration."""
    return FilePath(file) in shipped_configs().values()


def renamed_configs() -> Mapping[str, str]:
    """Return the current name of every renamed shipped configuration, by its name in the previous release."""
    return _RENAMED


def current_name(name: str) -> str | None:
    """Return the current name of a shipped configuration of the previous release, or None.

    Args:
        name: its former name, or its path in a clone, `configs/NAME.yaml`.
    """
    path = FilePath(name)
    bare = path.stem if path.suffix == ".yaml" and path.parent.name == _FOLDER.name else name
    return None if _is_there(name) else _RENAMED.get(bare)


def successor(name: str) -> str | None:
    """Return the arguments of `rlinf train` that replace a configuration that is no longer shipped, or None."""
    return _WITHDRAWN.get(name)


def meant_config(name: str) -> FilePath | None:
    """Return the shipped configuration that a job's name means, or None; a file of that name comes first."""
    return None if _is_there(name) else shipped_config(current_name(name) or name)


def _is_there(name: str) -> bool:
    """Return whether a file or a pipe has this name, which then means that file; a folder is not a job."""
    return os.path.exists(name) and not os.path.isdir(name)


def is_bare_name(name: str) -> bool:
    """Return whether `name` is one word that could be a recipe's: no folder, no extension."""
    return bool(name) and os.path.basename(name) == name and "." not in name and name != "-"
