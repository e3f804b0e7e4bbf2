"""A program for an interpreter with lerobot: SmolVLA acts, learns, and comes back from folders, lerobot's among them.

python smolvla_checks.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from safetensors.torch import load_file, save_file

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec
from recipes.embodied.envs.franka.franka_kin import FrankaVisionEnv
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.vla.smolvla import folder_config
from rlinf_core.errors import ConfigError

N, CHUNK, STEPS, ACTIONS = 3, 2, 4, 3
ENV = FrankaVisionEnv(EnvSettings(num_envs=N))
SEEN = ENV.reset()


def make(spec: EnvSpec = ENV.spec, **model: Any) -> Any:
    torch.manual_seed(0)
    options = {"max_prompt_tokens": 8, **model.pop("options", {})}
    inputs = {"model_type": "smolvla", "hidden_dim": 64, "num_action_chunks": CHUNK, "options": options, **model}
    return make_model(policy_model(inputs), spec)


def config(**model: Any) -> EmbodiedModelConfig:
    return policy_model({"model_type": "smolvla", "hidden_dim": 64, "num_action_chunks": CHUNK, **model})


def check_acting() -> None:
    inputs = make().prepare(SEEN)
    for dtype in (torch.float32, torch.bfloat16):
        policy = make().to(dtype)
        output = policy.act(inputs)
        assert output.actions.shape == (N, CHUNK, (STEPS + 1) * ACTIONS)
        assert output.logprobs.shape == (N, CHUNK, STEPS * ACTIONS)
        again = policy(inputs, output.actions)
        torch.testing.assert_close(again.logprobs, output.logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(again.values, output.values, atol=1e-4, rtol=0)
        assert policy.base.action_out_proj.weight.dtype == torch.float32
    before = make().act(inputs, greedy=True).actions
    for name, value in (
        ("images.main", 255 - SEEN["images.main"]),
        ("instructions", np.array(["touch the purple point"] * N)),
        ("states", SEEN["states"] + 1),
    ):
        policy = make()
        after = policy.act(policy.prepare({**SEEN, name: value}), greedy=True).actions
        assert (after - before).abs().max() > 1e-6, name


def check_training() -> None:
    policy = make(lora={"rank": 2})
    trained = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    assert any("lm_expert" in name and "lora_A" in name for name in trained)
    assert all("lora_" in name or name.startswith("critic.") for name in trained)
    policy = make(trainable=["smolvla.vlm_with_expert.lm_expert.*", "critic.*"])
    assert not any(".vlm." in name for name, weight in policy.named_parameters() if weight.requires_grad)
    inputs, gradients = make().prepare(SEEN), []
    actions = make().act(inputs, generator=torch.Generator().manual_seed(0)).actions
    for again in (False, True):
        policy = make()
        if again:
            policy.checkpoint_activations()
        policy(inputs, actions).logprobs.sum().backward()
        gradients.append(policy.base.action_in_proj.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    policy, losses = make(), []
    wanted = policy.from_env(np.random.default_rng(0).uniform(-1, 1, (N, CHUNK, ACTIONS)).astype(np.float32))
    wanted, rows = wanted.repeat(8, 1, 1), {name: torch.cat([item] * 8) for name, item in inputs.items()}
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(100):
        loss = policy.imitation_losses(rows, wanted).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:5]), losses


def check_folders(home: Path) -> None:
    source = make()
    save_policy(source, config(options={"max_prompt_tokens": 8}), ENV.spec, home / "own")
    again = make(model_path=str(home / "own"))
    inputs = source.prepare(SEEN)
    wanted = source.act(inputs, greedy=True).actions
    assert torch.equal(again.act(again.prepare(SEEN), greedy=True).actions, wanted)
    adapted = make(model_path=str(home / "own"), lora={"rank": 2})
    assert torch.equal(adapted.act(inputs, greedy=True).actions, wanted)
    # As lerobot writes a policy: its own class, its own configuration, its own statistics.
    folder, vlm = home / "lerobot", str(home / "own" / "backbone" / "vlm")
    shape = folder_config(str(home / "own" / "backbone"))
    theirs: Any = SmolVLAPolicy.__new__(SmolVLAPolicy)
    torch.nn.Module.__init__(theirs)
    theirs.config, theirs.model = shape, source.base
    folder.mkdir()
    theirs._save_pretrained(folder)
    stats = {"observation.state": (10, 1.0, 2.0), "action": (3, 0.5, 0.1)}
    save_file(
        {
            f"{name}.{kind}": torch.full((size,), value)
            for name, (size, mean, deviation) in stats.items()
            for kind, value in (("mean", mean), ("std", deviation))
        },
        folder / "policy_preprocessor_step_5_normalizer_processor.safetensors",
    )
    options = {"vlm_path": vlm, "steps": STEPS}
    read = make(model_path=str(folder), options=options)
    assert torch.equal(read.act(inputs, greedy=True).actions, wanted)
    np.testing.assert_allclose(read.prepare(SEEN)["states"].numpy(), (SEEN["states"] - 1) / 2, atol=1e-6)
    np.testing.assert_allclose(read.to_env(wanted), wanted[..., -ACTIONS:].numpy() * 0.1 + 0.5, atol=1e-6)
    refuse("vlm_path`, a folder of SmolVLM2", model_path=str(folder))
    refuse("predicts 2 actions", model_path=str(folder), options=options, num_action_chunks=4)
    refuse("no lerobot policy", model_path=str(home), options=options)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.state_proj.bias")
    save_file(weights, folder / "model.safetensors")
    refuse("they lack `state_proj.bias`", model_path=str(folder), options=options)


def refuse(said: str, **model: Any) -> None:
    result = ""
    try:
        make(**model)
    except ConfigError as error:
        result = f"{error.message} {error.why} {error.help}"
    assert said in result, (said, result)


if __name__ == "__main__":
    check_acting()
    print("held acting")
    check_training()
    print("held training")
    check_folders(Path(sys.argv[1]))
    print("held folders")
