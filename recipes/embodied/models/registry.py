"""Policies by `actor.model.model_type`."""

# pyright: reportUnknownVariableType=false

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Final, cast

from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.folder_facts import saved_type
from recipes.embodied.models.policy_folder import is_policy_folder, load_normalization, load_weights
from recipes.sections.algorithm import refuse_unknown_options
from recipes.training.tied_weights import require_finite
from recipes.training.without_memory import are_shapes_only
from rlinf_core import ConfigError
from rlinf_core.algorithms.options import checked_options
from rlinf_core.config.sections.values import ensure_here
from rlinf_core.registry import Registry

_MODELS: Registry[type[BasePolicy]] = Registry(
    "model_type",
    {
        "mlp_policy": "recipes.embodied.models.feature_policy:MlpPolicy",
        "cnn_policy": "recipes.embodied.models.feature_policy:CnnPolicy",
        "flow_policy": "recipes.embodied.models.flow_policy:FlowPolicy",
        "squashed_policy": "recipes.embodied.models.squashed_policy:SquashedPolicy",
        "steered_policy": "recipes.embodied.models.squashed_policy:SteeredPolicy",
        "pi0": "recipes.embodied.models.vla.pi_policy:Pi0Policy",
        "pi05": "recipes.embodied.models.vla.pi_policy:Pi05Policy",
        "smolvla": "recipes.embodied.models.vla.smolvla:SmolVlaPolicy",
        "openvla": "recipes.embodied.models.vla.openvla_policy:OpenVlaPolicy",
        "openvla_oft": "recipes.embodied.models.vla.openvla_policy:OpenVlaOftPolicy",
        "lerobot": "recipes.embodied.models.vla.lerobot_policy:LerobotPolicy",
    },
    bases=("recipes.embodied.models.base_policy:BasePolicy",),
)

register_model = _MODELS.register
# The attributes of every torch module.
_OF_TORCH: Final = frozenset(vars(nn.Module()))


def make_model(config: EmbodiedModelConfig, spec: EnvSpec) -> BasePolicy:
    """Return a policy in fp32 on the CPU, with the weights of the folder `model_path` or with new ones.

    Within `torch.device("meta")` it has only the shapes of these weights, and nothing is loaded.

    Args:
        config: the section `actor.model`.
        spec: the spec of the environment that it acts in.

    Raises:
        ConfigError: the model does not exist, or does not fit the environment.
    """
    if config.model_path is not None:
        ensure_here(config.model_path)
    policy = built_policy(config, spec)
    class_ = type(policy)
    if config.model_path is not None and class_.loads_policies and saved_type(config.model_path) != config.model_type:
        pass  # the constructor has loaded it
    elif config.model_path is not None and is_policy_folder(config.model_path):
        if not are_shapes_only():
            load_weights(policy, config.model_path)
        policy.normalization = load_normalization(config.model_path, spec)
    elif config.model_path is not None and not class_.loads_model_path:
        raise ConfigError(
            f"`{config.model_path}` holds no policy",
            why=f"it has no `policy.json`, which `{config.model_type}` needs",
            help="`actor.model.model_path` must name a folder that a policy was saved to",
        )
    if config.model_path is not None:
        require_finite(policy.named_parameters(), config.model_path)
    if config.trainable:
        _freeze(policy, config.trainable)
    return policy


def built_policy(config: EmbodiedModelConfig, spec: EnvSpec) -> BasePolicy:
    """Return a policy as its constructor makes it, without the weights of a folder of `save_policy`; see `make_model`.

    Raises:
        ConfigError: the model does not exist, or does not fit the environment.
    """
    class_ = _MODELS.get(config.model_type)
    refuse_unknown_options(config.options, {"model_type": config.model_type}, "actor.model.options")
    options = checked_options(class_, config.options, "actor.model.options")
    policy = class_(config.model_copy(update={"options": options}), spec)
    if ":" in config.model_type:
        _check_parts(policy)
    return policy


def _check_parts(policy: BasePolicy) -> None:
    """Refuse parts that torch does not register, which would be neither trained, sent nor saved.

    Raises:
        ConfigError: weights without a size, modules or weights in a list or dictionary, or a tensor with a gradient.
    """
    known = {id(part) for part in (*policy.modules(), *policy.parameters())}
    name = type(policy).__name__
    for place, weight in policy.named_parameters():
        if isinstance(weight, nn.UninitializedParameter):
            raise ConfigError(
                f"`{place}` of `{name}` has no size yet",
                why="a lazy layer takes its size from its first input, and weights are laid out before there is one",
                help="give the size: `spec.state_size` and `spec.cameras` say it",
            )
    for place, module in cast("Iterable[tuple[str, nn.Module]]", policy.named_modules()):
        for attribute, value in vars(module).items():
            if attribute in _OF_TORCH:
                continue
            where = f"`{'.'.join(filter(None, (place, attribute)))}` of `{name}`"
            if any(id(item) not in known and _trains(item) for item in _items(value)):
                raise ConfigError(
                    f"{where} is a {type(value).__name__} of layers or weights, which torch does not look into",
                    why="they would be neither trained, sent to rollout workers nor saved",
                    help="make it an `nn.ModuleList`, `nn.ModuleDict`, `nn.Sequential` or `nn.ParameterList`",
                )
            # A tensor computed from parameters, as by `weight_norm`, is trained by them.
            if isinstance(value, Tensor) and value.requires_grad and value.is_leaf and id(value) not in known:
                raise ConfigError(
                    f"{where} is a tensor with a gradient, and no parameter",
                    why="it would be neither trained, sent to rollout workers nor saved",
                    help=f"write `self.{attribute} = nn.Parameter(...)`, or leave out `requires_grad`",
                )


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[object, object]", value).values()
    return cast("Iterable[object]", value) if isinstance(value, list | tuple) else ()


def _trains(part: object) -> bool:
    """Return whether a part has trainable weights: a part hidden on purpose, such as a teacher, is frozen."""
    if isinstance(part, nn.Module):
        return any(weight.requires_grad for weight in part.parameters())
    return isinstance(part, nn.Parameter) and part.requires_grad


def _freeze(policy: BasePolicy, patterns: Sequence[str]) -> None:
    """Freeze all weights whose names match no pattern.

    Raises:
        ConfigError: a pattern matches no weight.
    """
    names = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            examples = ", ".join(f"`{name}`" for name in names[:: max(1, len(names) // 4)])
            raise ConfigError(
                f"no trainable weight of `{type(policy).__name__}` matches `{pattern}`",
                why=f"weight names are, for example, {examples}",
                help="`actor.model.trainable` holds name patterns, such as `critic.*`",
            )
    for name, weight in policy.named_parameters():
        weight.requires_grad_(weight.requires_grad and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
