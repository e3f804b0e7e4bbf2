"""The folder of a policy: weights as safetensors, what they belong to, and the statistics of states and actions.

    policy.json            the kind of the policy, its settings, and the sizes of its observations and actions
    model.safetensors      its weights
    normalization.json     statistics, where it was trained on normalized numbers
    backbone/              architecture and tokenizer of a vision-language model, where there is one

`actor.model.model_path` names such a folder to begin with its weights.
"""

# safetensors has few types.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.folder_facts import DESCRIPTION, SHARDS, STATISTICS, WEIGHTS
from recipes.embodied.models.normalization import Normalization
from recipes.training.state.adapter_names import beneath_adapters, new_adapters
from rlinf_core import ConfigError
from rlinf_core.foreign.strict_json import load_json_object

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedModelConfig
    from recipes.embodied.models.base_policy import BasePolicy

BACKBONE: Final = "backbone"
_FORMAT: Final = 1


def is_policy_folder(folder: str) -> bool:
    """Return whether `save_policy` wrote a folder; a checkpoint has a `policy.json` too, but other weights."""
    return os.path.isfile(Path(folder) / DESCRIPTION) and not os.path.isdir(Path(folder) / SHARDS)


def load_normalization(folder: str | None, spec: EnvSpec) -> Normalization:
    """Return the statistics in a folder, if any, for the states and actions of an environment.

    Raises:
        ConfigError: they are broken, or of another environment.
    """
    if not folder:
        return Normalization()
    found = Normalization.load(Path(folder)) or Normalization()
    _check_statistics(Path(folder), found)
    found.check(spec.state_size, spec.action_size, folder)
    return found


def _check_statistics(folder: Path, found: Normalization) -> None:
    """Refuse statistics that are not those which the policy was saved with.

    Raises:
        ConfigError: they are missing, or others.
    """
    try:
        expected = load_json_object((folder / DESCRIPTION).read_bytes())["statistics"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # an earlier version did not write them down; what else is broken is told with the weights
    if expected in (None, found.digest()):
        return
    is_missing = found == Normalization()
    raise ConfigError(
        "the policy's statistics are missing" if is_missing else "the statistics are not those of the policy",
        where=str(folder / STATISTICS),
        why="it was trained on normalized states and actions, and would act on others without them",
        help="copy the folder again, whole, from where the policy was trained",
    )


@torch.no_grad()
def save_policy(
    policy: BasePolicy,
    config: EmbodiedModelConfig,
    spec: EnvSpec,
    folder: Path,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a policy into a folder, aside and renamed; one that is there is replaced.

    Args:
        policy: what is written.
        config: the section `actor.model` that it was made by.
        spec: of its environment.
        folder: to write.
        weights: in one piece, where the policy has shards of them; None: its own.
    """
    from safetensors.torch import save_file

    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    own: Mapping[str, Tensor] = policy.state_dict() if weights is None else weights
    # A tensor that two layers share is written for each.
    save_file({name: each.detach().cpu().clone().contiguous() for name, each in own.items()}, aside / WEIGHTS)
    write_description(aside, config, spec, policy.normalization)
    if policy.normalization != Normalization():
        policy.normalization.save(aside)
    policy.save_files(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def write_description(folder: Path, config: EmbodiedModelConfig, spec: EnvSpec, found: Normalization) -> None:
    """Write `policy.json` into a folder: the section `actor.model` but for `model_path`, the environment's spec, and a
    digest of the statistics.
    """
    model = config.model_dump(mode="json", exclude={"model_path"})
    about: dict[str, Any] = {
        "format": _FORMAT,
        "recipe": "embodied",
        "model": model,
        "observations_and_actions": asdict(spec),
    }
    about["statistics"] = None if found == Normalization() else found.digest()
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=1) + "\n")


def read_description(folder: Path) -> tuple[dict[str, Any], EnvSpec]:
    """Return the section `actor.model` as plain data, and the spec, of `policy.json` in a folder.

    Raises:
        ConfigError: there is none, or it cannot be understood.
    """
    file = folder / DESCRIPTION
    try:
        about: dict[str, Any] = load_json_object(file.read_bytes())
        spec = dict(about["observations_and_actions"])
        spec["cameras"] = {name: tuple(shape) for name, shape in spec["cameras"].items()}
        spec |= {bound: tuple(spec[bound]) for bound in ("low", "high") if spec.get(bound) is not None}
        return about["model"], EnvSpec(**spec)
    except FileNotFoundError:
        raise ConfigError(
            "the folder does not say what the policy observes",
            where=str(folder),
            why=f"it has no `{DESCRIPTION}`: no policy was saved there, or by an earlier version",
            help="name a run, a checkpoint of this version, or a folder of `rlinf export --format safetensors`",
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"`{file}` cannot be understood", why=str(error), help="copy the folder again") from None


def load_weights(policy: BasePolicy, folder: str) -> None:
    """Give a policy the weights in a folder of `save_policy`.

    Raises:
        ConfigError: they cannot be read, or are of another policy.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS
    try:
        found: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the weights `{path}` cannot be read", why=str(error), help="copy the folder again"
        ) from None
    own: dict[str, Tensor] = policy.state_dict()
    names = beneath_adapters(own, found.keys())
    found = {name: each for name, each in found.items() if name not in names.values()} | {
        **{name: own[name] for name in new_adapters(own, found)},
        **{mine: found[theirs] for mine, theirs in names.items()},
    }
    different = _different(found, own)
    if different is not None:
        raise ConfigError(
            f"the weights in `{folder}` are of another policy",
            why=different,
            help=f"`{Path(folder) / DESCRIPTION}` has the settings that they were trained with: {_settings(folder)}",
        )
    policy.load_state_dict(found)


def _different(found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    """Return the first difference between weights of a file and those of a policy; None where there is none."""
    for name, mine in own.items():
        if name not in found:
            return f"it lacks `{name}`"
        if found[name].shape != mine.shape:
            return f"`{name}` is {list(found[name].shape)} there and {list(mine.shape)} here"
    strange = next((name for name in found if name not in own), None)
    return None if strange is None else f"it has `{strange}` besides"


def _settings(folder: str) -> str:
    try:
        about: dict[str, Any] = load_json_object((Path(folder) / DESCRIPTION).read_bytes())
        model = about["model"]
        names = ("model_type", "hidden_dim", "num_action_chunks", "add_value_head")
        return ", ".join(f"{name}: {json.dumps(model[name])}" for name in names)
    except (OSError, ValueError, KeyError):
        return "which cannot be read"
