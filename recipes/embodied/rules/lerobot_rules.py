"""The packages that models need where actor and rollout run, and the rules of `model_type: lerobot`."""

from __future__ import annotations

from typing import Final

from recipes.embodied.config import EmbodiedConfig, PolicyJob
from recipes.embodied.config.model_options import RANDOM_LEROBOT
from recipes.embodied.models.folder_facts import lerobot_type
from recipes.sections.checks import Report
from recipes.sections.imports import runs_in_this_interpreter
from rlinf_core.config.tree import Path
from rlinf_core.process.requirements import absence, install_command, missing_modules

# The package that a model needs besides torch.
_PACKAGES: Final = {
    **dict.fromkeys(("pi0", "pi05", "openvla", "openvla_oft"), "transformers"),
    **dict.fromkeys(("smolvla", "lerobot"), "lerobot"),
}
_TYPE: Final[Path] = ("actor", "model", "model_type")
_PRECISION: Final[Path] = ("actor", "model", "precision")


def check_lerobot(config: PolicyJob, report: Report) -> None:
    """Report an interpreter without the package of a model, and what none of lerobot's policies can do."""
    model = config.actor.model
    _check_packages(config, report)
    if model.model_type != "lerobot":
        return
    if model.precision != "fp32":
        report(
            _PRECISION,
            "conflicting-settings",
            "lerobot's policies create fp32 tensors internally, which weights of another dtype cannot take",
            "remove it; to compute in bf16, write `actor.fsdp_config.mixed_precision.param_dtype: bf16`",
            about=[_TYPE],
        )
    if isinstance(config, EmbodiedConfig) and not config.runner.only_eval:
        _check_density(config, report)


def _check_packages(config: PolicyJob, report: Report) -> None:
    model = config.actor.model
    named = _PACKAGES.get(model.model_type)
    needed = [] if named is None else [named] if model.adapter() is None else [named, "peft"]
    components = [name for name in ("actor", "rollout") if name in config.cluster.component_placement]
    here = next((name for name in components if runs_in_this_interpreter(config, name)), None)
    missing = missing_modules(needed) if here is not None else []
    if not missing:
        return
    help = f"run `{install_command(*missing)}`"
    if "lerobot" in missing:
        help = (
            "create an environment with `pip install lerobot` and this rlinf, and name it as"
            " `python_interpreter_path` in `env_configs` of the node group of actor and rollout"
            f" (docs/models/{model.model_type}.md)"
        )
    report(
        _TYPE,
        "missing-extra",
        f"`{model.model_type}` needs the package `{missing[0]}`, {absence(missing[0])}, where `{here}` runs",
        help,
    )


def _check_density(config: EmbodiedConfig, report: Report) -> None:
    """Report a policy that rewards cannot train."""
    kind = lerobot_type(config.actor.model)
    if kind is None or kind in RANDOM_LEROBOT:
        return
    own = {"pi0": "pi0", "pi05": "pi05", "smolvla": "smolvla"}.get(kind)
    report(
        _TYPE,
        "conflicting-settings",
        f"lerobot's `{kind}` gives no probability of its actions, which learning from rewards needs",
        f"write `model_type: {own}`, which reads the same folder and has one"
        if own
        else f"train it by `recipe: sft`, use {' or '.join(f'`{name}`' for name in RANDOM_LEROBOT)}, or"
        " `model_type: flow_policy`, which denoises actions, too, and learns from rewards",
        about=[("actor", "model", "options", "type"), ("actor", "model", "model_path")],
    )
