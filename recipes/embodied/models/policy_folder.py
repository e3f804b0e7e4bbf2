"""The folder of a policy: safetensors weights, their description, and the statistics of states and actions.

    policy.json            the kind of the policy, its settings, and the sizes of its observations and actions
    model.safetensors      its weights
    normalization.json     statistics, where it was trained on normalized numbers
    backbone/              architecture and tokenizer of a vision-language model, where there is one

`actor.model.model_path` names such a folder to start from its weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.folder_facts import DESCRIPTION, SHARDS, STATISTICS, WEIGHTS, fault_of_fit
from recipes.embodied.models.normalization import Normalization
from recipes.sections.model_folders import read_object
from recipes.training.tied_weights import beneath_adapters, new_adapters
from recipes.training.weights.training_state import ACTOR
from recipes.training.weights.training_state import load_weights as load_checkpoint_weights
from rlinf_core import CheckpointError, ConfigError
from rlinf_core.config.validating.validation_messages import refusals
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.runners.storage.checkpoint import MANIFEST, verify_files
from rlinf_core.runners.storage.first_contact import Difference, FirstContact

# safetensors has few types.
# pyright: reportUnknownVariableType=false


BACKBONE: Final = "backbone"
_FORMAT: Final = 1


def is_policy_folder(folder: str) -> bool:
    """Return whether `save_policy` wrote a folder; a checkpoint has a `policy.json` too, but other weights."""
    return os.path.isfile(Path(folder) / DESCRIPTION) and not os.path.isdir(Path(folder) / SHARDS)


def backbone_of(model_path: str | None) -> tuple[str | None, bool]:
    """Return the folder with the architecture and the tokenizer of a policy (None for a newly built one), and whether
    `save_policy` wrote it, so that all weights are loaded later, including the value head.
    """
    if model_path is None or not is_policy_folder(model_path):
        return model_path, False
    return str(Path(model_path) / BACKBONE), True


def load_normalization(folder: str | None, spec: EnvSpec) -> Normalization:
    """Return the statistics in a folder, if any, for the states and actions of an environment.

    Raises:
        ConfigError: the statistics are broken, or of another environment.
    """
    if not folder:
        return Normalization()
    normalization = Normalization.load(Path(folder)) or Normalization()
    _check_statistics(Path(folder), normalization)
    normalization.check(spec.state_size, spec.action_size, folder)
    return normalization


def _check_statistics(folder: Path, normalization: Normalization) -> None:
    """Refuse statistics other than those that the policy was saved with.

    Raises:
        ConfigError: the statistics are missing, or different.
    """
    # An earlier version wrote no digest; other damage is reported with the weights.
    if read_object(folder / DESCRIPTION).get("statistics") in (None, normalization.digest()):
        return
    is_missing = normalization == Normalization()
    raise ConfigError(
        "the policy's statistics are missing" if is_missing else "the statistics do not match the policy",
        where=str(folder / STATISTICS),
        why="it was trained on normalized states and actions and cannot act without the statistics",
        help="copy the complete folder again from where the policy was trained",
    )


@torch.no_grad()
def save_policy(
    policy: BasePolicy,
    config: EmbodiedModelConfig,
    spec: EnvSpec,
    folder: Path,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a policy folder atomically, replacing an existing one.

    Args:
        policy: the policy to write.
        config: the section `actor.model` that it was made from.
        spec: the spec of its environment.
        folder: the folder to write.
        weights: the full weights, if the policy holds shards; None: its own.
    """
    from safetensors.torch import save_file

    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    own: Mapping[str, Tensor] = policy.state_dict() if weights is None else weights
    # A tensor that two layers share is written under both names.
    save_file({name: weight.detach().cpu().clone().contiguous() for name, weight in own.items()}, aside / WEIGHTS)
    write_description(aside, config, spec, policy.normalization)
    if policy.normalization != Normalization():
        policy.normalization.save(aside)
    policy.save_files(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def write_description(folder: Path, config: EmbodiedModelConfig, spec: EnvSpec, normalization: Normalization) -> None:
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
    about["statistics"] = None if normalization == Normalization() else normalization.digest()
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=1) + "\n")


class _Described(BaseModel):
    """The contents of `policy.json`: the section `actor.model`, and the spec of the environment."""

    model: dict[str, Any]
    observations_and_actions: EnvSpec


def read_description(folder: Path) -> tuple[dict[str, Any], EnvSpec]:
    """Return the section `actor.model` as plain data, and the spec, of `policy.json` in a folder.

    Raises:
        ConfigError: the file is missing, or cannot be parsed.
    """
    file = folder / DESCRIPTION
    try:
        about = load_json_object(read_bounded(file))
        if about.get("format") != _FORMAT:
            raise ValueError(f"`format` is {json.dumps(about.get('format'))}, and this rlinf reads {_FORMAT}")
        described = _Described.model_validate_json(json.dumps(about), strict=True)
        return described.model, described.observations_and_actions
    except FileNotFoundError:
        raise ConfigError(
            "the folder does not describe the policy's observations",
            where=str(folder),
            why=f"it has no `{DESCRIPTION}`: no policy was saved there, or an earlier version saved it",
            help="name a run, a checkpoint of this version, or a folder of `rlinf export --format safetensors`",
        ) from None
    except (OSError, ValueError) as error:
        why = refusals(error)[0] if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"`{file}` is invalid", why=why, help="copy the folder again") from None


def load_weights(policy: BasePolicy, folder: str) -> None:
    """Load the weights in a folder of `save_policy` into a policy.

    Raises:
        ConfigError: the weights cannot be read, or are of another policy.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS
    try:
        weights: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the weights `{path}` cannot be read", why=str(error), help="copy the folder again"
        ) from None
    own: dict[str, Tensor] = policy.state_dict()
    names = beneath_adapters(own, weights.keys())
    weights = {name: weight for name, weight in weights.items() if name not in names.values()} | {
        **{name: own[name] for name in new_adapters(own, weights)},
        **{mine: weights[theirs] for mine, theirs in names.items()},
    }
    different = _different(weights, own)
    if different is not None:
        raise ConfigError(
            f"the weights in `{folder}` belong to another policy",
            why=different,
            help=f"`{Path(folder) / DESCRIPTION}` has the settings of their training: {_settings(folder)}",
        )
    policy.load_state_dict(weights)


def _different(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    """Return the first difference between weights of a file and those of a policy; None if there is none."""
    for name, mine in own.items():
        if name not in weights:
            return f"it lacks `{name}`"
        if weights[name].shape != mine.shape:
            return f"`{name}` is {list(weights[name].shape)} there but {list(mine.shape)} here"
    strange = next((name for name in weights if name not in own), None)
    return None if strange is None else f"it also has `{strange}`"


def _settings(folder: str) -> str:
    model = read_object(Path(folder) / DESCRIPTION).get("model")
    if not isinstance(model, dict):
        return "which cannot be read"
    names = ("model_type", "hidden_dim", "num_action_chunks", "add_value_head")
    return ", ".join(f"{name}: {json.dumps(model[name])}" for name in names if name in model)


def load_trained(policy: BasePolicy, model: EmbodiedModelConfig, spec: EnvSpec, checkpoint: str) -> None:
    """Load a checkpoint's weights into a policy, with the statistics that normalize states and actions.

    Args:
        policy: takes the weights.
        model: the section `actor.model` that it was made from.
        spec: the spec of the environment that it acts in.
        checkpoint: a folder `global_step_N` that this node sees.

    Raises:
        CheckpointError: the checkpoint cannot be read, is damaged, or is of another model.
        ConfigError: the statistics are missing, broken or of another environment.
    """
    if (Path(checkpoint) / MANIFEST).is_file():
        # Only the files that are read here, not a replay buffer beside them, which may be much larger.
        verify_files(Path(checkpoint), within=(f"{ACTOR}/", STATISTICS, DESCRIPTION))
    fault = fault_of_fit(Path(checkpoint), model, spec)
    if fault is not None:
        raise CheckpointError(fault.message, where=checkpoint, help=fault.help)
    policy.normalization = load_normalization(checkpoint, spec)
    load_checkpoint_weights(Path(checkpoint), policy)


def keep_loaded(contact: FirstContact, policy: BasePolicy, source: str | None) -> None:
    """Record the comparisons that loading weights and statistics has passed; None: nothing was loaded."""
    if source is None:
        return
    contact.keep("weights that training begins with", "names and shapes of the policy's own", Difference(note=source))
    if policy.normalization != Normalization():
        about = Difference(note=f"{policy.normalization.scheme}, {source}")
        contact.keep("statistics", "sizes of the environment's states and actions", about)
