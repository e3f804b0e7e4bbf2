"""Loading of a checkpoint's weights and statistics into a policy."""

from __future__ import annotations

from pathlib import Path

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.folder_facts import DESCRIPTION, STATISTICS, fault_of_fit
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import load_normalization
from recipes.training.state.state_checkpoint import ACTOR, load_weights
from rlinf_core import CheckpointError
from rlinf_core.runners.storage.checkpoint import MANIFEST, verify_files
from rlinf_core.runners.storage.first_contact import Difference, FirstContact


def load_trained(policy: BasePolicy, model: EmbodiedModelConfig, spec: EnvSpec, checkpoint: str) -> None:
    """Load a checkpoint's weights into a policy, with the statistics that normalize states and actions.

    Args:
        policy: takes the weights.
        model: the section `actor.model` that it was made by.
        spec: the spec of the environment that it acts in.
        checkpoint: a folder `global_step_N` that this node sees.

    Raises:
        CheckpointError: it cannot be read, is damaged, or is of another model.
        ConfigError: the statistics are missing, broken or of another environment.
    """
    if (Path(checkpoint) / MANIFEST).is_file():
        # What is read here, and not a replay buffer beside it, which may be much larger.
        verify_files(Path(checkpoint), within=(f"{ACTOR}/", STATISTICS, DESCRIPTION))
    fault = fault_of_fit(Path(checkpoint), model, spec)
    if fault is not None:
        raise CheckpointError(fault.message, where=checkpoint, help=fault.help)
    policy.normalization = load_normalization(checkpoint, spec)
    load_weights(Path(checkpoint), policy)


def keep_loaded(contact: FirstContact, policy: BasePolicy, source: str | None) -> None:
    """Record the comparisons that loading weights and statistics has passed; None: nothing was loaded."""
    if source is None:
        return
    contact.keep("weights that training begins with", "names and shapes of the policy's own", Difference(note=source))
    if policy.normalization != Normalization():
        about = Difference(note=f"{policy.normalization.scheme}, {source}")
        contact.keep("statistics", "sizes of the environment's states and actions", about)
