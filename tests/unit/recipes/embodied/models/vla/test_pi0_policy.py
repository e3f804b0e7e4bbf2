"""pi0: it acts as transformers' own does, evaluates what it draws, and loads HuggingFace folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation
from recipes.embodied.envs.franka.franka_vision import FrankaVisionEnv
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.vla.image_pipeline import ImagePipeline
from recipes.embodied.models.vla.pi_network import GemmaSizes, Pi05Network, PiShape
from rlinf_core.errors import ConfigError
from tests.unit.recipes.embodied.models.vla.pi_folders import write_openpi

pytest.importorskip("transformers", reason="the extra `language` is not installed")

N, CHUNK, STEPS, ACTIONS = 3, 2, 3, 3
ROOMY = {"max_state_dim": 16, "max_action_dim": 5}


def environment() -> tuple[EnvSpec, Observation]:
    env = FrankaVisionEnv(EnvSettings(num_envs=N))
    return env.spec, env.reset()


def config(**model: Any) -> EmbodiedModelConfig:
    kept = {"num_layers": 1, "max_prompt_tokens": 7, "steps": STEPS, "statistics": "none"}
    options = {**kept, **model.pop("options", {})}
    inputs = {"model_type": "pi0", "hidden_dim": 64, "num_action_chunks": CHUNK, "options": options, **model}
    return policy_model(inputs)


def make(**model: Any) -> Any:
    torch.manual_seed(0)
    return make_model(config(**model), environment()[0])


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` writes one, of a model with room for more states and actions than there are."""
    from transformers import PI0Config, PI0ForConditionalGeneration

    folder = tmp_path_factory.mktemp("models") / "pi0"
    source = make()
    shape = PI0Config.from_dict({**source.base.config.to_dict(), **ROOMY})
    torch.manual_seed(5)
    PI0ForConditionalGeneration(shape).save_pretrained(folder)
    source.tokenizer.save_pretrained(folder)
    return folder


def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def sampled(policy: Any, inputs: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
    """Return what transformers makes of the same inputs, from the noise 0."""
    model = policy.base
    pixels = ImagePipeline((32, 32)).pixels(inputs["images.main"])[:, None]
    images = torch.full((N, 16), model.config.vlm_config.image_token_id)
    room = model.config.max_state_dim
    return model.sample_actions(
        state=torch.nn.functional.pad(inputs["states"], (0, room - inputs["states"].shape[1])),
        input_ids=torch.cat((images, inputs["prompt.tokens"]), dim=1),
        pixel_values=pixels,
        noise=torch.zeros(N, CHUNK, model.config.max_action_dim),
        attention_mask=torch.cat((torch.ones_like(images), inputs["prompt.mask"].long()), dim=1),
        pixel_attention_mask=torch.ones(N, 1, dtype=torch.bool),
        num_steps=steps,
    )


def test_it_acts_as_the_model_of_transformers_does(huggingface: Path) -> None:
    for policy in (make(), make(model_path=str(huggingface))):
        inputs = policy.prepare(environment()[1])
        actions = policy.to_env(policy.act(inputs, greedy=True).actions)
        theirs = sampled(policy, inputs, STEPS)[..., :ACTIONS]
        np.testing.assert_allclose(actions, theirs.numpy(), atol=1e-4)


@pytest.mark.parametrize("noisy", ["all", "one"])
def test_the_first_of_the_predicted_actions_are_carried_out(huggingface: Path, noisy: str) -> None:
    """Ratios are of what the environment gets: 1 of 2 actions, and 3 of the 5 numbers that there is room for."""
    policy = make(model_path=str(huggingface), num_action_chunks=1, options={"noisy_steps": noisy})
    whole = make(model_path=str(huggingface))
    inputs = policy.prepare(environment()[1])
    output, judged = policy.act(inputs), STEPS if noisy == "all" else 1
    assert policy.horizon == CHUNK
    assert output.logprobs.shape == (N, 1, judged * ACTIONS)
    torch.testing.assert_close(policy(inputs, output.actions).logprobs, output.logprobs, atol=1e-5, rtol=0)
    greedy = [item.to_env(item.act(inputs, greedy=True).actions) for item in (policy, whole)]
    np.testing.assert_allclose(greedy[0], greedy[1][:, :1], atol=1e-6)


def test_time_keeps_its_precision() -> None:
    exact = make().base.embed_action_time.sinusoid_embeds.sinusoid_freq
    blurred = make().to(torch.bfloat16).base.embed_action_time.sinusoid_embeds.sinusoid_freq
    assert torch.equal(exact, blurred)


def test_patterns_choose_what_is_trained(huggingface: Path) -> None:
    expert = make(model_path=str(huggingface), trainable=["pi0.model.dit.*", "critic.*"])
    frozen = {name for name, weight in expert.named_parameters() if not weight.requires_grad}
    assert all(name.startswith("pi0.") for name in frozen)
    assert any(".vlm." in name for name in frozen)
    assert not any(".dit.layers." in name for name in frozen)


def test_statistics_of_its_processor_are_used(huggingface: Path, tmp_path: Path) -> None:
    folder = copied(huggingface, tmp_path)
    about = {"state_mean": [1.0] * 10, "state_std": [2.0] * 10, "actions_mean": [0.5] * 3, "actions_std": [0.1] * 3}
    (folder / "processor_config.json").write_text(json.dumps(about))
    kept = {"model_path": str(folder), "options": {"statistics": "folder"}}
    policy, seen = make(**kept), environment()[1]
    inputs = policy.prepare(seen)
    np.testing.assert_allclose(inputs["states"].numpy(), (seen["states"] - 1) / 2, atol=1e-6)
    output = policy.act(inputs)
    np.testing.assert_allclose(policy.to_env(output.actions), output.actions[..., -5:-2].numpy() * 0.1 + 0.5, atol=1e-6)
    (folder / "processor_config.json").write_text(json.dumps({**about, "actions_mean": [0.5] * 7}))
    with pytest.raises(ConfigError, match=r"statistics in .* cannot be read"):
        make(**kept)
    (folder / "processor_config.json").write_text(
        json.dumps({**about, "actions_mean": [0.5] * 7, "actions_std": [1.0] * 7})
    )
    with pytest.raises(ConfigError, match="have 7 numbers; the environment needs 3"):
        make(**kept)
    (folder / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"(?s)has no statistics.*`actor.model.options.statistics: none`"):
        make(**kept)


def test_names_of_lerobot_are_read(huggingface: Path, tmp_path: Path) -> None:
    folder = copied(huggingface, tmp_path)
    about = json.loads((folder / "config.json").read_text())
    del about["model_type"]
    (folder / "config.json").write_text(json.dumps({**about, "type": "pi0"}))
    # transformers saves nearly the names of lerobot, whose own classes run in
    # tests/integration/recipes/policies/policy_contract.
    weights = load_file(folder / "model.safetensors")
    for ours, theirs in (("language_model.model.", "language_model."), ("vision_tower.", "vision_tower.vision_model.")):
        weights = {name.replace(ours, theirs): weight for name, weight in weights.items()}
    save_file({f"model.{name}": weight for name, weight in weights.items()}, folder / "model.safetensors")
    policy, source = make(model_path=str(folder)), make(model_path=str(huggingface))
    mine, wanted = policy.base.state_dict(), source.base.state_dict()
    read = [name for name in mine if "dit.embed_tokens" not in name]  # which is never read
    assert all(torch.equal(mine[name], wanted[name]) for name in read)
    assert policy.base.config.max_state_dim == 16


def test_pytorch_folders_of_openpi_are_read(tmp_path: Path) -> None:
    """The weights, statistics and images of openpi, by whose shapes the sizes are known; and saved as a policy."""
    source, seen = make(), environment()[1]
    language, expert = GemmaSizes(64, 128, 1, 2, 32), GemmaSizes(32, 64, 1, 2, 32)
    network = Pi05Network(PiShape(language, expert, (64, 128, 1, 16), 32, 8, len(source.tokenizer), 10, CHUNK))
    weights = network.state_dict()
    kept = {name: weight for name, weight in weights.items() if "dense" not in name and "time" not in name}
    norms = [name for name in weights if name.endswith("dense.weight")]
    kept |= {name.replace("dense.weight", "weight"): torch.full((32,), 0.2) for name in norms}
    for name, columns in {"state_proj": 10, "action_time_mlp_in": 64, "action_time_mlp_out": 32}.items():
        kept |= {f"{name}.weight": 0.1 * torch.randn(32, columns), f"{name}.bias": torch.zeros(32)}
    folder = tmp_path / "openpi"
    folder.mkdir()
    write_openpi(folder, kept)
    source.tokenizer.save_pretrained(str(folder))
    policy = make(model_path=str(folder), num_action_chunks=1, options={"statistics": "folder"})
    mine = policy.base.state_dict()
    for name in ("vlm.vision_tower.encoder.layers.0.mlp.fc1.weight", "vlm.language_model.embed_tokens.weight"):
        assert torch.equal(mine[f"model.{name}"], kept[name])
    assert torch.equal(mine["embed_action_time.state_proj.weight"], kept["state_proj.weight"])
    assert torch.equal(mine["model.dit.norm.weight"], torch.full((32,), 0.2))
    assert policy.horizon == 6
    inputs = policy.prepare(seen)
    np.testing.assert_allclose(inputs["states"].numpy(), (seen["states"] - 0.5) / 2, atol=1e-5)
    output = policy.act(inputs, greedy=True)
    np.testing.assert_allclose(policy.to_env(output.actions), output.actions[:, :1, :3] * 2 + 0.5, atol=1e-5)
    save_policy(policy, config(num_action_chunks=1), environment()[0], tmp_path / "saved")
    again = make_model(config(model_path=str(tmp_path / "saved"), num_action_chunks=1), environment()[0])
    assert torch.equal(again.act(inputs, greedy=True).actions, output.actions)
    assert again.describe_images() == policy.describe_images()


def test_other_folders_are_refused_by_name(huggingface: Path, tmp_path: Path) -> None:
    folder = copied(huggingface, tmp_path)
    with pytest.raises(ConfigError, match="predicts 2 actions, but `num_action_chunks` is 4"):
        make(model_path=str(folder), num_action_chunks=4)
    assert make(model_path=str(folder), num_action_chunks=4, options={"action_horizon": 4}).shape == (4, ACTIONS)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "model_type": "llava"}))
    with pytest.raises(ConfigError, match="`pi0` cannot use the `llava`"):
        make(model_path=str(folder))
    (folder / "config.json").write_text(json.dumps(about))
    weights = load_file(folder / "model.safetensors")
    weights.pop("action_out_proj.weight")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"(?s)do not belong to a `PI0For.*they lack `action_out_proj.weight`"):
        make(model_path=str(folder))
    with pytest.raises(ConfigError, match="does not exist"):
        make(model_path=str(tmp_path / "nowhere"))


def test_environments_that_do_not_fit_are_refused(huggingface: Path) -> None:
    images = {"main": (32, 32, 3)}
    for spec, said in (
        (EnvSpec(4, 7, cameras=images), "holds 5 numbers per action; the environment needs 7"),
        (EnvSpec(20, 5, cameras=images), "holds 16 numbers per state; the environment needs 20"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_model(config(model_path=str(huggingface)), spec)
