"""pi0 and pi0.5: they act as the original networks do, and folders of others are read whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.embodied.config import EmbodiedModelConfig, PolicyActorConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.embodied_memory import policy_sizes
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation
from recipes.embodied.envs.franka.franka_kin import FrankaVisionEnv
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.vla.pi_network import GemmaSizes, Pi05Network, PiShape
from recipes.embodied.models.vla.pi_policy import spelled_states
from recipes.embodied.models.vla.vision_language import ImagePipeline, built_tokenizer
from rlinf_core.errors import ConfigError
from tests.unit.recipes.embodied.models.vla.pi_folders import (
    HORIZON,
    ROOM,
    SHAPE,
    drawn_network,
    published_name,
    write_lerobot,
    write_openpi,
)

pytest.importorskip("transformers", reason="the extra `language` is not installed")
N, CHUNK, ACTIONS = 3, 2, 3


def environment() -> tuple[EnvSpec, Observation]:
    env = FrankaVisionEnv(EnvSettings(num_envs=N))
    return env.spec, env.reset()


def config(**model: Any) -> EmbodiedModelConfig:
    inputs = {"model_type": "pi05", "hidden_dim": 64, "num_action_chunks": CHUNK, **model}
    inputs["options"] = {"num_layers": 1, "max_prompt_tokens": 120, "steps": 3, **model.pop("options", {})}
    return policy_model(inputs)


def make(**model: Any) -> Any:
    torch.manual_seed(0)
    return make_model(config(**model), environment()[0])


@pytest.fixture
def lerobot(tmp_path: Path) -> Path:
    write_lerobot(tmp_path)
    built_tokenizer().save_pretrained(str(tmp_path))
    return tmp_path


@pytest.fixture
def openpi(tmp_path: Path) -> Path:
    write_openpi(tmp_path)
    built_tokenizer().save_pretrained(str(tmp_path))
    return tmp_path


def read(network: Pi05Network) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
    """Return keys and values of two observations, one of which is padded."""
    generator = torch.Generator().manual_seed(1)
    memory = tuple(
        (torch.randn(2, 1, 4, 8, generator=generator), torch.randn(2, 1, 4, 8, generator=generator))
        for _ in range(SHAPE.expert.layers)
    )
    return memory, torch.tensor([[True] * 4, [True, True, True, False]])


def test_an_expert_of_constant_norms_is_a_gemma() -> None:
    """With gates of 1 and no shift it computes what transformers' Gemma computes, which has other code."""
    from transformers import DynamicCache, GemmaConfig, GemmaModel

    sizes, network = SHAPE.expert, drawn_network()
    theirs = GemmaModel(
        GemmaConfig(
            hidden_size=sizes.width,
            intermediate_size=sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=1,
            head_dim=sizes.head_dim,
            vocab_size=1,
        )
    )
    kept: dict[str, Tensor] = {"embed_tokens.weight": torch.zeros(1, sizes.width)}
    for name, weight in network.expert.state_dict().items():
        if name.endswith("dense.weight"):
            weight.zero_()
        elif name.endswith("dense.bias"):
            scale = 0.3 * torch.randn(sizes.width, generator=torch.Generator().manual_seed(len(name)))
            weight.copy_(torch.cat((scale, torch.zeros(sizes.width), torch.ones(sizes.width))))
            kept[name.replace("dense.bias", "weight")] = scale
        else:
            kept[name] = weight
    theirs.load_state_dict(kept)
    memory, mask = read(network)
    actions = torch.randn(2, 3, sizes.width, generator=torch.Generator().manual_seed(2))
    cache = DynamicCache()
    for index, (keys, values) in enumerate(memory):
        cache.update(keys, values, index)
    seen = torch.cat((mask, torch.ones(2, 3, dtype=torch.bool)), dim=1)[:, None, None].expand(-1, -1, 3, -1)
    with torch.no_grad():
        wanted = theirs(
            inputs_embeds=actions,
            attention_mask=torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
            position_ids=mask.sum(dim=1, keepdim=True) + torch.arange(3),
            past_key_values=cache,
        ).last_hidden_state
        mine = network.expert(actions, torch.randn(2, sizes.width), memory, mask)
    torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-4)


def test_norms_scale_shift_and_gate_by_time() -> None:
    norm = drawn_network().expert.norm
    x, condition = torch.randn(2, 3, 16), torch.randn(2, 16)
    scale, shift, gate = (condition @ norm.dense.weight.T + norm.dense.bias).chunk(3, dim=-1)
    wanted = x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * (1 + scale[:, None]) + shift[:, None]
    normed, gated = norm(x, condition)
    torch.testing.assert_close(normed, wanted)
    torch.testing.assert_close(gated, gate[:, None])


def test_states_are_spelled_in_256_parts() -> None:
    states = np.array([[-1.5, -1, -0.999, 0, 0.995, 1, 2]], np.float32)
    assert spelled_states(states, 0) == ["-1 0 0 128 255 255 255"]
    assert spelled_states(states[:, :1], 3) == ["-1 128 128"]


@pytest.mark.parametrize("casts", ["weights", "computation"])
def test_bfloat16_acts_nearly_alike(openpi: Path, casts: str) -> None:
    exact = make(model_path=str(openpi))
    policy = exact if casts == "computation" else make(model_path=str(openpi)).to(torch.bfloat16)
    inputs = exact.prepare(environment()[1])
    wanted = exact.act(inputs, greedy=True).actions
    with torch.autocast("cpu", torch.bfloat16, enabled=casts == "computation"):
        actions = policy.act(inputs, greedy=True).actions
        output = policy.act(inputs, generator=torch.Generator().manual_seed(0))
        again = policy(inputs, output.actions)
    assert (actions.float() - wanted).abs().max() < 0.05 * wanted.abs().max()
    torch.testing.assert_close(again.logprobs, output.logprobs, atol=0.02, rtol=0)


def test_folders_of_lerobot_are_read_whole(lerobot: Path) -> None:
    policy, seen = make(model_path=str(lerobot), options={"steps": None}), environment()[1]
    wanted = drawn_network().state_dict()
    assert policy.base.state_dict().keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in policy.base.state_dict().items())
    assert policy.describe_images()["padding"] == "black, on both sides"
    assert (policy.horizon, policy.sde.steps) == (HORIZON, 5)
    normalized = (seen["states"] + 1) / 2 - 1
    np.testing.assert_allclose(policy.prepare(seen)["states"].numpy(), normalized, atol=1e-6)
    prompt = policy.prompts(["pick_up the cup\n"], normalized[:1].astype(np.float32))[0]
    numbers = spelled_states(normalized[:1].astype(np.float32), 0)[0]
    assert prompt == f"<s>Task: pick up the cup, State: {numbers};\nAction: "
    output = policy.act(policy.prepare(seen), greedy=True)
    np.testing.assert_allclose(policy.to_env(output.actions), output.actions[:, :CHUNK, :3] * 2 + 1, atol=1e-5)


def test_folders_of_openpi_are_read_whole(openpi: Path) -> None:
    policy, seen = make(model_path=str(openpi)), environment()[1]
    wanted = drawn_network().state_dict()
    assert all(torch.equal(weight, wanted[name]) for name, weight in policy.base.state_dict().items())
    inputs = policy.prepare(seen)
    np.testing.assert_allclose(inputs["states"].numpy(), (seen["states"] + 1) / (4 + 1e-6) * 2 - 1, atol=1e-5)
    assert policy.prompts(["go"], np.zeros((1, 10), np.float32))[0].count("128") == 10
    blind = make(model_path=str(openpi), options={"prompt": "{instruction}\n"})
    assert blind.prompts(["go"], np.zeros((1, 10), np.float32)) == ["<s>go\n"]


def test_relative_actions_are_added_to_the_state(openpi: Path) -> None:
    """As openpi's `DeltaActions` and `AbsoluteActions`: the first two numbers, before and after the statistics."""
    plain, relative = (make(model_path=str(openpi), options={"relative_actions": count}) for count in (0, 2))
    seen = environment()[1]
    inputs = relative.prepare(seen)
    added = np.pad(seen["states"][:, None, :2], ((0, 0), (0, 0), (0, 1)))
    for greedy in (True, False):
        drawn = [
            item.act(inputs, greedy=greedy, generator=torch.Generator().manual_seed(0)) for item in (plain, relative)
        ]
        taken = [item.to_env(output.actions) for item, output in zip((plain, relative), drawn, strict=True)]
        np.testing.assert_allclose(taken[1], taken[0] + added, atol=1e-5)
    again = relative(inputs, drawn[1].actions)
    torch.testing.assert_close(again.logprobs, drawn[1].logprobs, atol=1e-4, rtol=0)
    actions = np.random.default_rng(0).normal(size=(N, HORIZON, ACTIONS)).astype(np.float32)
    losses: list[Tensor] = []
    for policy, demonstrated in ((plain, actions - added), (relative, actions)):
        torch.manual_seed(1)
        losses.append(policy.imitation_losses(policy.prepare(seen), policy.from_env(demonstrated)))
    torch.testing.assert_close(losses[0], losses[1], atol=1e-4, rtol=1e-4)


def test_relative_actions_need_states_and_statistics(openpi: Path) -> None:
    with pytest.raises(ConfigError, match="10 numbers in a state and 3 in an action"):
        make(model_path=str(openpi), options={"relative_actions": 4})
    with pytest.raises(ConfigError, match="needs the statistics of the model's own folder"):
        make(options={"relative_actions": 2})


def test_greedy_actions_are_eulers_steps_from_zero(openpi: Path) -> None:
    """The loop of openpi, written out: time goes from 1 to 0."""
    policy = make(model_path=str(openpi))
    inputs = policy.prepare(environment()[1])
    seen = policy.see(inputs)
    x, time = torch.zeros(N, HORIZON, ROOM), 1.0
    with torch.no_grad():
        for _ in range(3):
            x = x - policy.base.velocity(seen.memory, seen.mask, x, torch.full((N,), time)) / 3
            time -= 1 / 3
    np.testing.assert_allclose(policy.act(inputs, greedy=True).actions.numpy(), x.numpy(), atol=1e-5)


def test_blocks_hold_each_layer_once(openpi: Path) -> None:
    """What is gathered at a time: SigLIP's layers, projections of those that read, the expert's layers."""
    policy = make(model_path=str(openpi))
    held = [id(weight) for block in policy.blocks for weight in block.parameters()]
    assert len(held) == len(set(held))
    layers = [weight for name, weight in policy.named_parameters() if ".layers." in name and "language" not in name]
    assert {id(weight) for weight in layers} <= set(held)


def test_other_weights_are_refused_by_name(openpi: Path) -> None:
    weights = load_file(openpi / "model.safetensors")
    save_file({**weights, "proprio.weight": torch.zeros(1)}, openpi / "model.safetensors")
    with pytest.raises(ConfigError, match=r"they also have `proprio\.weight`"):
        make(model_path=str(openpi))
    named = published_name("expert.layers.1.mlp.up_proj.weight")
    save_file({name: weight for name, weight in weights.items() if name != named}, openpi / "model.safetensors")
    with pytest.raises(ConfigError, match=r"they lack `expert\.layers\.1\.mlp\.up_proj\.weight`"):
        make(model_path=str(openpi))
    renamed = {name.replace("time_mlp", "action_time_mlp"): weight for name, weight in weights.items()}
    save_file(renamed, openpi / "model.safetensors")
    with pytest.raises(ConfigError, match="`pi05` cannot use the pi0 in"):
        make(model_path=str(openpi))
    save_file(weights, openpi / "model.safetensors")
    with pytest.raises(ConfigError, match="predicts 6 actions, but `num_action_chunks` is 9"):
        make(model_path=str(openpi), num_action_chunks=9)
    (openpi / "config.json").write_text(json.dumps({"type": "pi05", "action_horizon": 5}))
    with pytest.raises(ConfigError, match=r"(?s)has no pi05.*it lacks 'chunk_size'"):
        make(model_path=str(openpi))


def test_the_published_sizes_are_forecast_without_weights(tmp_path: Path) -> None:
    """lerobot's `pi05_base`: a PaliGemma of 2.9 billion weights, and an expert of 0.4."""
    variants = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
    about = {"type": "pi05", "chunk_size": 50, "max_state_dim": 32, "max_action_dim": 32, **variants}
    (tmp_path / "config.json").write_text(json.dumps(about))
    built_tokenizer().save_pretrained(str(tmp_path))
    spec = EnvSpec(8, 7, cameras={"main": (256, 256, 3), "wrist": (256, 256, 3)}, has_instructions=True)
    inputs = {"model_type": "pi05", "model_path": str(tmp_path), "num_action_chunks": 5, "precision": "bf16"}
    sizes = {
        noisy: policy_sizes(
            PolicyActorConfig.model_validate({"model": {**inputs, "options": {"noisy_steps": noisy}}}), spec
        )
        for noisy in ("all", "one")
    }
    assert 3.3e9 < sizes["all"].weights / 4 < 3.4e9
    assert sizes["all"].acting == sizes["all"].weights / 2
    # One step from noise to actions is learned from, and not ten.
    assert sizes["one"].learning < sizes["all"].learning
    assert sizes["one"].sample < sizes["all"].sample


@pytest.mark.parametrize(
    "damage",
    [
        {"image": 1 << 40},
        {"vocabulary": "many"},
        {"language": {"width": 1 << 40, "hidden": 48, "layers": 2, "heads": 4, "head_dim": 8}},
        {"vision": [32, 40, 2]},
        {"beta": [1.5, "one"]},
    ],
)
def test_sizes_that_were_changed_are_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    SHAPE.save(tmp_path)
    assert PiShape.load(tmp_path) == SHAPE
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    with pytest.raises(ConfigError, match=r"describes no pi0\.5"):
        PiShape.load(tmp_path)


STEPS = 3
ROOMY = {"max_state_dim": 16, "max_action_dim": 5}


def pi0_config(**model: Any) -> EmbodiedModelConfig:
    kept = {"num_layers": 1, "max_prompt_tokens": 7, "steps": STEPS, "statistics": "none"}
    options = {**kept, **model.pop("options", {})}
    inputs = {"model_type": "pi0", "hidden_dim": 64, "num_action_chunks": CHUNK, "options": options, **model}
    return policy_model(inputs)


def pi0(**model: Any) -> Any:
    torch.manual_seed(0)
    return make_model(pi0_config(**model), environment()[0])


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` writes one, of a model with room for more states and actions than there are."""
    from transformers import PI0Config, PI0ForConditionalGeneration

    folder = tmp_path_factory.mktemp("models") / "pi0"
    source = pi0()
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
    for policy in (pi0(), pi0(model_path=str(huggingface))):
        inputs = policy.prepare(environment()[1])
        actions = policy.to_env(policy.act(inputs, greedy=True).actions)
        theirs = sampled(policy, inputs, STEPS)[..., :ACTIONS]
        np.testing.assert_allclose(actions, theirs.numpy(), atol=1e-4)


@pytest.mark.parametrize("noisy", ["all", "one"])
def test_the_first_of_the_predicted_actions_are_carried_out(huggingface: Path, noisy: str) -> None:
    """Ratios are of what the environment gets: 1 of 2 actions, and 3 of the 5 numbers that there is room for."""
    policy = pi0(model_path=str(huggingface), num_action_chunks=1, options={"noisy_steps": noisy})
    whole = pi0(model_path=str(huggingface))
    inputs = policy.prepare(environment()[1])
    output, judged = policy.act(inputs), STEPS if noisy == "all" else 1
    assert policy.horizon == CHUNK
    assert output.logprobs.shape == (N, 1, judged * ACTIONS)
    torch.testing.assert_close(policy(inputs, output.actions).logprobs, output.logprobs, atol=1e-5, rtol=0)
    greedy = [item.to_env(item.act(inputs, greedy=True).actions) for item in (policy, whole)]
    np.testing.assert_allclose(greedy[0], greedy[1][:, :1], atol=1e-6)


def test_time_keeps_its_precision() -> None:
    exact = pi0().base.embed_action_time.sinusoid_embeds.sinusoid_freq
    blurred = pi0().to(torch.bfloat16).base.embed_action_time.sinusoid_embeds.sinusoid_freq
    assert torch.equal(exact, blurred)


def test_patterns_choose_what_is_trained(huggingface: Path) -> None:
    expert = pi0(model_path=str(huggingface), trainable=["pi0.model.dit.*", "critic.*"])
    frozen = {name for name, weight in expert.named_parameters() if not weight.requires_grad}
    assert all(name.startswith("pi0.") for name in frozen)
    assert any(".vlm." in name for name in frozen)
    assert not any(".dit.layers." in name for name in frozen)


def test_statistics_of_its_processor_are_used(huggingface: Path, tmp_path: Path) -> None:
    folder = copied(huggingface, tmp_path)
    about = {"state_mean": [1.0] * 10, "state_std": [2.0] * 10, "actions_mean": [0.5] * 3, "actions_std": [0.1] * 3}
    (folder / "processor_config.json").write_text(json.dumps(about))
    kept = {"model_path": str(folder), "options": {"statistics": "folder"}}
    policy, seen = pi0(**kept), environment()[1]
    inputs = policy.prepare(seen)
    np.testing.assert_allclose(inputs["states"].numpy(), (seen["states"] - 1) / 2, atol=1e-6)
    output = policy.act(inputs)
    np.testing.assert_allclose(policy.to_env(output.actions), output.actions[..., -5:-2].numpy() * 0.1 + 0.5, atol=1e-6)
    (folder / "processor_config.json").write_text(json.dumps({**about, "actions_mean": [0.5] * 7}))
    with pytest.raises(ConfigError, match=r"statistics in .* cannot be read"):
        pi0(**kept)
    (folder / "processor_config.json").write_text(
        json.dumps({**about, "actions_mean": [0.5] * 7, "actions_std": [1.0] * 7})
    )
    with pytest.raises(ConfigError, match="have 7 numbers; the environment needs 3"):
        pi0(**kept)
    (folder / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"(?s)has no statistics.*`actor.model.options.statistics: none`"):
        pi0(**kept)


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
    policy, source = pi0(model_path=str(folder)), pi0(model_path=str(huggingface))
    mine, wanted = policy.base.state_dict(), source.base.state_dict()
    read = [name for name in mine if "dit.embed_tokens" not in name]  # which is never read
    assert all(torch.equal(mine[name], wanted[name]) for name in read)
    assert policy.base.config.max_state_dim == 16


def test_pytorch_folders_of_openpi_are_read(tmp_path: Path) -> None:
    """The weights, statistics and images of openpi, by whose shapes the sizes are known; and saved as a policy."""
    source, seen = pi0(), environment()[1]
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
    policy = pi0(model_path=str(folder), num_action_chunks=1, options={"statistics": "folder"})
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
    save_policy(policy, pi0_config(num_action_chunks=1), environment()[0], tmp_path / "saved")
    again = make_model(pi0_config(model_path=str(tmp_path / "saved"), num_action_chunks=1), environment()[0])
    assert torch.equal(again.act(inputs, greedy=True).actions, output.actions)
    assert again.describe_images() == policy.describe_images()


def test_other_folders_are_refused_by_name(huggingface: Path, tmp_path: Path) -> None:
    folder = copied(huggingface, tmp_path)
    with pytest.raises(ConfigError, match="predicts 2 actions, but `num_action_chunks` is 4"):
        pi0(model_path=str(folder), num_action_chunks=4)
    assert pi0(model_path=str(folder), num_action_chunks=4, options={"action_horizon": 4}).shape == (4, ACTIONS)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "model_type": "llava"}))
    with pytest.raises(ConfigError, match="`pi0` cannot use the `llava`"):
        pi0(model_path=str(folder))
    (folder / "config.json").write_text(json.dumps(about))
    weights = load_file(folder / "model.safetensors")
    weights.pop("action_out_proj.weight")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"(?s)do not belong to a `PI0For.*they lack `action_out_proj.weight`"):
        pi0(model_path=str(folder))
    with pytest.raises(ConfigError, match="does not exist"):
        pi0(model_path=str(tmp_path / "nowhere"))


def test_environments_that_do_not_fit_are_refused(huggingface: Path) -> None:
    images = {"main": (32, 32, 3)}
    for spec, said in (
        (EnvSpec(4, 7, cameras=images), "holds 5 numbers per action; the environment needs 7"),
        (EnvSpec(20, 5, cameras=images), "holds 16 numbers per state; the environment needs 20"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_model(pi0_config(model_path=str(huggingface)), spec)
