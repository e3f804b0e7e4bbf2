"""A program for an interpreter with lerobot: its policies act, lose and are saved here as by lerobot itself.

python lerobot_checks.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.imitation import ImitationData
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.workers.rollout_worker import TemporalEnsemble
from rlinf_core.errors import ConfigError

N, CHUNK, STATES, ACTIONS, ROWS = 3, 4, 5, 2, 40
# Small sizes, by lerobot's own names.
SIZES: dict[str, dict[str, Any]] = {
    "act": {"dim_model": 32, "n_heads": 2, "dim_feedforward": 64, "chunk_size": 8, "dropout": 0.0, "latent_dim": 4},
    "diffusion": {"horizon": 8, "down_dims": [16, 32], "n_groups": 4, "num_train_timesteps": 5, "use_group_norm": True},
    "vqbet": {
        "action_chunk_size": CHUNK,
        "n_action_pred_token": 1,
        "gpt_hidden_dim": 32,
        "gpt_n_head": 2,
        "gpt_n_layer": 1,
        "gpt_input_dim": 32,
        "gpt_output_dim": 32,
    },
}
TEMPORAL = {"temporal_ensemble_coeff": 0.1}
PIXELS = {"act": 64, "diffusion": 96, "vqbet": 96}


def config_of(kind: str, **model: Any) -> EmbodiedModelConfig:
    options = {"type": kind, "config": SIZES[kind], **model.pop("options", {})}
    return policy_model({"model_type": "lerobot", "num_action_chunks": CHUNK, "options": options, **model})


def spec_of(kind: str, camera: str = "main") -> EnvSpec:
    return EnvSpec(STATES, ACTIONS, cameras={camera: (PIXELS[kind], PIXELS[kind], 3)})


def observed(kind: str) -> dict[str, Any]:
    random = np.random.default_rng(1)
    return {
        "states": random.normal(2, 3, (N, STATES)).astype(np.float32),
        "images.main": random.integers(0, 256, (N, PIXELS[kind], PIXELS[kind], 3), np.uint8),
    }


def rows() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(2, 3, (ROWS, STATES)).astype(np.float32), random.normal(-1, 2, (ROWS, ACTIONS))


def batch_of(kind: str) -> dict[str, Any]:
    """Return what lerobot's own data sets give for the same observations."""
    seen = observed(kind)
    pictures = torch.from_numpy(seen["images.main"]).permute(0, 3, 1, 2).float() / 255
    return {"observation.state": torch.from_numpy(seen["states"]), "observation.images.main": pictures}


def check_ensemble() -> None:
    """Average chunks of 30 steps by lerobot's own class of ACT, and by ours."""
    from lerobot.policies.act.modeling_act import ACTTemporalEnsembler

    chunks = torch.randn(30, N, 8, ACTIONS, generator=torch.Generator().manual_seed(0))
    for coefficient in (0.01, 0.0, -0.2):
        theirs, ours = ACTTemporalEnsembler(coefficient, 8), TemporalEnsemble(1, coefficient)
        for chunk in chunks:
            away = (theirs.update(chunk.clone()) - ours.add(chunk)[:, 0]).abs().max()
            assert away < 1e-6, (coefficient, away)


def check_steering(folder: Path) -> None:
    """Choose the noise of a DDIM diffusion policy: the same actions as by lerobot's `noise`."""
    torch.manual_seed(0)
    options = {"config": {**SIZES["diffusion"], "noise_scheduler_type": "DDIM", "num_inference_steps": 3}}
    model, spec = config_of("diffusion", options=options), spec_of("diffusion")
    policy: Any = make_model(model, spec)
    policy.normalization = policy.normalization_of(*rows())
    save_policy(policy, model, spec, folder)
    section = {"model_type": "steered_policy", "model_path": str(folder), "num_action_chunks": CHUNK}
    steered: Any = make_model(policy_model(section), spec)
    output = steered.act(steered.prepare(observed("diffusion")), greedy=True)
    noise = 1.5 * output.actions[:, 0, : steered.action_size].view(N, 8, ACTIONS)

    theirs: Any = get_policy_class("diffusion").from_pretrained(folder, local_files_only=True)
    pre, post = make_pre_post_processors(theirs.config, pretrained_path=str(folder))
    theirs.eval()
    theirs.reset()
    made = pre(batch_of("diffusion"))
    chunk = torch.stack([post(theirs.select_action(dict(made), noise=noise)) for _ in range(CHUNK)], dim=1).numpy()
    away = np.abs(steered.to_env(output.actions) - chunk).max()
    assert away < 1e-4, away


def check_folder(kind: str, folder: Path) -> None:
    """Train one step, save, and let lerobot alone load the folder: the same chunk, the same loss."""
    torch.manual_seed(0)
    model, spec = config_of(kind), spec_of(kind)
    policy: Any = make_model(model, spec)
    policy.normalization = policy.normalization_of(*rows())
    seen = observed(kind)
    horizon = policy.horizon
    actions = np.random.default_rng(2).normal(-1, 2, (N, horizon, ACTIONS)).astype(np.float32)
    valid = torch.arange(horizon) < torch.tensor([[horizon], [horizon - 2], [horizon]])
    before = [weight.detach().clone() for weight in policy.parameters()]
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    policy.imitation_loss(policy.prepare(seen), policy.from_env(actions), valid).backward()
    optimizer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True)), kind
    save_policy(policy, model, spec, folder)

    theirs: Any = get_policy_class(kind).from_pretrained(folder, local_files_only=True, strict=kind != "act")
    pre, post = make_pre_post_processors(theirs.config, pretrained_path=str(folder))
    theirs.eval()
    theirs.reset()
    torch.manual_seed(0)
    made = pre(batch_of(kind))
    chunk = torch.stack([post(theirs.select_action(dict(made))) for _ in range(CHUNK)], dim=1).numpy()
    ours = policy.to_env(policy.act(policy.prepare(seen), greedy=True).actions)
    assert ours.shape == (N, CHUNK, ACTIONS)
    assert np.abs(ours - chunk).max() < 1e-4, (kind, np.abs(ours - chunk).max())
    again = policy.to_env(policy.act(policy.prepare(seen), greedy=True).actions)
    assert np.array_equal(ours, again), kind

    theirs.train()
    shown = pre({**batch_of(kind), "action": torch.from_numpy(actions)})
    if theirs.config.observation_delta_indices is not None:
        shown = {key: value[:, None] if key.startswith("observation.") else value for key, value in shown.items()}
    losses: list[float] = []
    for loss in (
        lambda: theirs.forward({**shown, "action_is_pad": ~valid})[0],
        lambda: policy.imitation_loss(policy.prepare(seen), policy.from_env(actions), valid),
    ):
        torch.manual_seed(3)
        losses.append(float(loss()))
    assert abs(losses[0] - losses[1]) < 1e-5 * max(1, abs(losses[0])), (kind, losses)

    loaded: Any = make_model(config_of(kind, model_path=str(folder)), spec)
    acted = loaded.to_env(loaded.act(loaded.prepare(seen), greedy=True).actions)
    assert np.array_equal(acted, ours), kind
    print(kind, "chunk", float(np.abs(ours - chunk).max()), "loss", abs(losses[0] - losses[1]))


def check_density() -> None:
    """Drawn actions have the log-probabilities that training computes again; rewards reach the whole network."""
    torch.manual_seed(0)
    policy: Any = make_model(config_of("act"), spec_of("act"))
    policy.normalization = policy.normalization_of(*rows())
    inputs = policy.prepare(observed("act"))
    drawn = policy.act(inputs, generator=torch.Generator().manual_seed(0))
    judged = policy(inputs, drawn.actions)
    normal = torch.distributions.Normal(policy.act(inputs, greedy=True).actions, policy.log_std.exp())
    assert torch.allclose(judged.logprobs, normal.log_prob(drawn.actions), atol=1e-4)
    assert torch.allclose(judged.logprobs, drawn.logprobs, atol=1e-4)
    assert torch.allclose(judged.values, drawn.values, atol=1e-5)
    (judged.logprobs.sum() + judged.values.sum()).backward()
    dead = [name for name, weight in policy.named_parameters() if weight.grad is None]
    # The encoder of demonstrated actions is for demonstrations.
    assert all(name.startswith("model.vae_encoder") for name in dead), dead


def check_windows(folder: Path) -> None:
    """Windows of demonstrations are those of lerobot's `delta_timestamps`, at both ends of an episode, too."""
    from lerobot_sets import LeRobotDataset

    features = {
        name: Feature("float32", (size,)) for name, size in (("observation.state", STATES), ("action", ACTIONS))
    }
    random = np.random.default_rng(0)
    with DatasetWriter(folder, 10, features) as writer:
        for length in (4, 7):
            columns = {
                name: random.normal(size=(length, *of.shape)).astype(np.float32) for name, of in features.items()
            }
            writer.add(columns, "reach")
    spec = EnvSpec(STATES, ACTIONS, low=(None,) * ACTIONS, high=(None,) * ACTIONS)
    ours = ImitationData(DemonstrationsConfig.model_validate({"train_data_paths": str(folder)}), spec, CHUNK)
    steps, horizon = 3, 6
    seen, wanted = list(range(1 - steps, 1)), list(range(1 - steps, 1 - steps + horizon))
    deltas = {name: [step / 10 for step in of] for name, of in (("observation.state", seen), ("action", wanted))}
    theirs: Any = LeRobotDataset("local/set", root=folder, delta_timestamps=deltas)
    observations, actions, valid = ours.rows(np.arange(len(ours)), horizon, wanted[0], steps)
    states = np.concatenate((observations["past.states"], observations["states"][:, None]), axis=1)
    for row in range(len(ours)):
        item = theirs[row]
        assert np.array_equal(item["observation.state"], states[row]), row
        assert np.array_equal(item["action"], actions[row]), row
        assert np.array_equal(item["action_is_pad"], ~valid[row]), row
    print("windows", len(ours))


def check_refusals() -> None:
    for kind, message, model in (
        ("act", "dim_modle", {"options": {"config": {"dim_modle": 3}}}),
        ("act", "temporal_ensemble_coeff", {"options": {"config": TEMPORAL}, "num_action_chunks": 1}),
        ("act", "n_action_steps|chunk size|upper bound", {"num_action_chunks": 9}),
    ):
        check_refused(message, config_of(kind, **model), spec_of(kind))


def check_refused(message: str, model: EmbodiedModelConfig, spec: EnvSpec) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make_model(model, spec)


if __name__ == "__main__":
    made = Path(sys.argv[1])
    for name in SIZES:
        check_folder(name, made / name)
        print("held", name)
    check_density()
    print("held density")
    check_ensemble()
    print("held ensemble")
    check_steering(made / "steered")
    print("held steering")
    check_windows(made / "set")
    print("held windows")
    check_refusals()
    print("held refusals")
