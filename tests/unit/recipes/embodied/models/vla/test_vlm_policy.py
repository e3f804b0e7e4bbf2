"""The vision-language-action policy: it evaluates what it draws, sees, reads, learns, and comes back from disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation
from recipes.embodied.envs.franka.franka_vision import FrankaVisionEnv
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.vla.image_pipeline import ImagePipeline
from rlinf_core.errors import ConfigError

pytest.importorskip("transformers", reason="the extra `language` is not installed")

N, CHUNK = 3, 2


def environment() -> tuple[EnvSpec, Observation]:
    env = FrankaVisionEnv(EnvSettings(num_envs=N))
    return env.spec, env.reset()


def config(**model: Any) -> EmbodiedModelConfig:
    options = {"num_layers": 1, "max_prompt_tokens": 6, **model.pop("options", {})}
    inputs = {"model_type": "vlm_policy", "hidden_dim": 32, "num_action_chunks": CHUNK, "options": options, **model}
    return EmbodiedModelConfig.model_validate(inputs)


def make(**model: Any) -> BasePolicy:
    torch.manual_seed(0)
    return make_model(config(**model), environment()[0])


@pytest.mark.parametrize("decoding", ["parallel", "autoregressive"])
def test_what_is_drawn_is_what_is_evaluated(decoding: str) -> None:
    policy = make(options={"decoding": decoding})
    inputs = policy.prepare(environment()[1])
    output = policy.act(inputs)
    assert output.actions.shape == output.logprobs.shape == (N, CHUNK, 3)
    again = policy(inputs, output.actions)
    torch.testing.assert_close(again.logprobs, output.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(again.values, output.values, atol=1e-5, rtol=0)
    torch.testing.assert_close(policy.values(inputs), output.values, atol=1e-5, rtol=0)
    assert again.entropy.shape == output.logprobs.shape
    assert torch.equal(policy.act(inputs, greedy=True).actions, policy.act(inputs, greedy=True).actions)
    actions = policy.to_env(output.actions)
    assert actions.dtype == np.float32
    assert np.abs(actions).max() <= 1
    assert torch.equal(policy.from_env(actions), output.actions)


def test_tokens_depend_on_earlier_ones_only_when_generated() -> None:
    inputs = make().prepare(environment()[1])
    first = torch.zeros(N, CHUNK, 3, dtype=torch.int64)
    other = first.clone()
    other[:, 0, 0] = 7
    one, parallel = make(options={"decoding": "autoregressive"}), make()
    assert (one(inputs, first).logprobs - one(inputs, other).logprobs)[:, 1].abs().max() > 1e-6
    assert torch.equal(parallel(inputs, first).logprobs[:, 1], parallel(inputs, other).logprobs[:, 1])


def test_it_sees_reads_and_feels() -> None:
    policy = make()
    seen = environment()[1]
    before = policy.act(policy.prepare(seen), greedy=True).logprobs
    for name, value in (
        ("images.main", 255 - seen["images.main"]),
        ("instructions", np.array(["touch the green point"] * N)),
        ("states", seen["states"] + 1),
    ):
        after = policy.act(policy.prepare({**seen, name: value}), greedy=True).logprobs
        assert (after - before).abs().max() > 1e-6, name


@pytest.mark.parametrize("trained", [True, False])
def test_values_train_the_layers_below_them_where_that_is_wanted(trained: bool) -> None:
    policy = make(options={"value_gradient": trained})
    inputs = policy.prepare(environment()[1])
    policy(inputs, policy.act(inputs).actions).values.sum().backward()
    touched = {
        name for name, weight in policy.named_parameters() if weight.grad is not None and weight.grad.abs().max() > 0
    }
    assert any(name.startswith("critic.") for name in touched)
    assert any(not name.startswith("critic.") for name in touched) == trained


def test_padding_changes_nothing() -> None:
    short, long = make(), make(options={"max_prompt_tokens": 20})
    seen = environment()[1]
    actions = torch.zeros(N, CHUNK, 3, dtype=torch.int64)
    logprobs = [policy(policy.prepare(seen), actions).logprobs for policy in (short, long)]
    torch.testing.assert_close(*logprobs, atol=1e-5, rtol=0)


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    policy, seen = make(), environment()[1]
    with pytest.raises(ConfigError, match="`max_prompt_tokens: 6`"):
        policy.prepare({**seen, "instructions": np.array(["xyzzy" * 9] * N)})


def test_it_learns_from_demonstrations() -> None:
    policy, seen = make(), environment()[1]
    inputs = policy.prepare(seen)
    wanted = policy.from_env(np.random.default_rng(0).uniform(-1, 1, (N, CHUNK, 3)).astype(np.float32))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(100):
        loss = policy.imitation_losses(inputs, wanted).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (policy.act(inputs, greedy=True).actions == wanted).float().mean() > 0.9


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 2}}])
def test_it_comes_back_from_its_folder(tmp_path: Path, model: dict[str, Any]) -> None:
    spec, seen = environment()
    policy, folder = make(**model), tmp_path / "policy"
    rows = np.random.default_rng(0).normal(size=(9, 13))
    policy.normalization = Normalization("quantile", Statistics.of(rows[:, :10]), Statistics.of(rows[:, 10:]))
    save_policy(policy, config(**model), spec, folder)
    torch.manual_seed(1)
    again = make_model(config(model_path=str(folder), **model), spec)
    assert again.normalization == policy.normalization
    inputs = policy.prepare(seen)
    assert all(torch.equal(value, again.prepare(seen)[name]) for name, value in inputs.items())
    result, theirs = policy.act(inputs, greedy=True), again.act(inputs, greedy=True)
    assert torch.equal(result.actions, theirs.actions)
    assert np.array_equal(policy.to_env(result.actions), again.to_env(theirs.actions))


def test_weights_of_another_policy_are_refused(tmp_path: Path) -> None:
    spec, folder = environment()[0], tmp_path / "policy"
    save_policy(make(), config(), spec, folder)
    with pytest.raises(ConfigError, match=r"(?s)to another policy.*`places` is \[6, 32\] there but \[9, 32\] here"):
        make_model(config(model_path=str(folder), num_action_chunks=3), spec)


def test_a_folder_of_huggingface_is_loaded(tmp_path: Path) -> None:
    """The architecture from a small config, as the real folders are written; its own sizes count."""
    source = make(hidden_dim=64)
    source.vlm.base.save_pretrained(tmp_path)
    source.tokenizer.save_pretrained(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [0.9] * 3}))
    policy = make(model_path=str(tmp_path), hidden_dim=8, is_lora=True, lora_rank=2)
    weights = dict(policy.named_parameters())
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    assert any(".lora_A" in name for name in trained)
    assert not any(name.endswith("base_layer.weight") for name in trained)
    assert {"critic.0.weight", "places", "project.weight"} <= set(trained)
    theirs = source.vlm.base.get_input_embeddings().weight
    assert torch.equal(policy.vlm.base.get_input_embeddings().weight, theirs)
    output = policy.act(policy.prepare(environment()[1]))
    assert output.actions.shape == (N, CHUNK, 3)


CLIP = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


@pytest.mark.parametrize(
    ("files", "scale"),
    [
        ({"preprocessor_config.json": CLIP}, CLIP),
        ({"processor_config.json": {"image_processor": CLIP, "patch_size": 14}}, CLIP),
        ({"processor_config.json": CLIP}, CLIP),
        ({"preprocessor_config.json": CLIP, "processor_config.json": {"image_processor": None}}, CLIP),
        ({"processor_config.json": {"patch_size": 14}}, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}),
        ({}, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}),
    ],
)
def test_colours_are_those_of_the_folders_processor(files: Any, scale: dict[str, Any], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    images = ImagePipeline.load(str(tmp_path), (8, 8), "stretched")
    assert (images.mean, images.deviation) == (tuple(scale["image_mean"]), tuple(scale["image_std"]))


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"tokenizer|safetensors"):
        make(model_path=str(tmp_path))


def test_checkpointed_activations_give_the_same_gradients() -> None:
    inputs = make().prepare(environment()[1])
    actions = torch.ones(N, CHUNK, 3, dtype=torch.int64)
    gradients: list[torch.Tensor] = []
    for again in (False, True):
        policy = make()
        if again:
            policy.checkpoint_activations()
        policy(inputs, actions).logprobs.sum().backward()
        gradients.append(policy.vlm.layers[0].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_weights_are_frozen_by_their_names() -> None:
    policy = make(trainable=["critic.*", "places"])
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert trained == {"places", "critic.0.weight", "critic.0.bias", "critic.2.weight", "critic.2.bias"}
    with pytest.raises(ConfigError, match="matches `expert"):
        make(trainable=["expert.*"])


def test_a_small_policy_takes_only_folders_of_policies(tmp_path: Path) -> None:
    spec = EnvSpec(4, 2)
    small = EmbodiedModelConfig(hidden_dim=8)
    policy = make_model(small, spec)
    save_policy(policy, small, spec, tmp_path / "policy")
    again = make_model(small.model_copy(update={"model_path": str(tmp_path / "policy")}), spec)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in policy.state_dict().items())
    with pytest.raises(ConfigError, match="holds no policy"):
        make_model(small.model_copy(update={"model_path": str(tmp_path)}), spec)


def test_it_computes_in_bfloat16() -> None:
    policy = make().to(torch.bfloat16)
    inputs = policy.prepare(environment()[1])
    output = policy.act(inputs)
    torch.testing.assert_close(policy(inputs, output.actions).logprobs, output.logprobs, atol=0.05, rtol=0)


def test_an_environment_without_images_is_refused() -> None:
    with pytest.raises(ConfigError, match="`vlm_policy` needs images"):
        make_model(config(), EnvSpec(4, 2))


def test_adapters_are_put_on_what_was_trained_without(tmp_path: Path) -> None:
    spec, seen = environment()
    policy, folder = make(), tmp_path / "policy"
    save_policy(policy, config(), spec, folder)
    torch.manual_seed(1)
    adapted = make_model(config(model_path=str(folder), lora={"rank": 2}), spec)
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert any("lora_A" in name for name in trained)
    inputs = policy.prepare(seen)
    result, theirs = policy.act(inputs, greedy=True), adapted.act(adapted.prepare(seen), greedy=True)
    assert torch.equal(result.actions, theirs.actions)
    torch.testing.assert_close(result.logprobs, theirs.logprobs)
