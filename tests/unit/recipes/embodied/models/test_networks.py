"""Networks of policies: ensembles of critics, flows, and what becomes of images, against formulas written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.distributions import Normal

from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.critics import BatchRenorm, Critics, EnsembleLinear, Norm
from recipes.embodied.models.flow_policy import FlowSde, OneStepSde
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.squashed_policy import features_of
from recipes.embodied.models.vla.vision_language import ImagePipeline
from rlinf_core.errors import ConfigError

SPEC = EnvSpec(state_size=5, action_size=2)


def test_each_member_is_a_network_of_its_own() -> None:
    torch.manual_seed(0)
    critics = Critics(SPEC, 3, 8)
    inputs, actions = {"states": torch.randn(4, 5)}, torch.randn(4, 2)
    values = critics(inputs, actions)
    assert values.shape == (3, 4)
    for member in range(3):
        layers: list[nn.Module] = []
        for layer in critics.critic:
            if isinstance(layer, EnsembleLinear):
                plain = nn.Linear(layer.weight.shape[1], layer.weight.shape[2])
                plain.weight.data, plain.bias.data = layer.weight[member].T, layer.bias[member, 0]
                layers.append(plain)
            else:
                layers.append(nn.ReLU())
        alone = nn.Sequential(*layers)(torch.cat((inputs["states"], actions), dim=1))[:, 0]
        torch.testing.assert_close(values[member], alone)
    assert not torch.allclose(values[0], values[1])


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_critics_see_states_images_or_both(norm: Norm) -> None:
    for states in (0, 3):
        spec = EnvSpec(state_size=states, action_size=2, cameras={"main": (36, 40, 3)})
        critics = Critics(spec, 2, 8, layers=1, norm=norm)
        inputs = {"images.main": torch.randint(256, (4, 36, 40, 3), dtype=torch.uint8)}
        inputs |= {"states": torch.randn(4, states)} if states else {}
        values = critics(inputs, torch.randn(4, 2))
        assert values.shape == (2, 4)
        values.sum().backward()
        assert all(weight.grad is not None for weight in critics.parameters())


def test_keypoints_find_a_small_thing_of_its_own_colour() -> None:
    torch.manual_seed(0)
    spec = EnvSpec(state_size=3, action_size=2, cameras={"main": (16, 20, 3)})
    features, size = features_of(spec, 8, "keypoints")
    images = torch.full((2, 16, 20, 3), 180, dtype=torch.uint8)
    images[0, 15, 19] = images[1, 0, 0] = torch.tensor((20, 190, 60), dtype=torch.uint8)
    inputs = {"images.main": images, "states": torch.zeros(2, 3)}
    places = features(inputs)
    assert places.shape == (2, size)
    assert places[0].max() > 0.9
    assert places[1].min() < -0.9
    critics = Critics(spec, 2, 8, images="keypoints")
    critics(inputs, torch.zeros(2, 2)).sum().backward()
    assert all(weights.grad is not None for weights in critics.parameters())


@torch.no_grad()
def test_keypoints_of_many_images_are_those_of_each() -> None:
    torch.manual_seed(0)
    spec = EnvSpec(state_size=0, action_size=2, cameras={"main": (8, 10, 3)})
    features, _ = features_of(spec, 8, "keypoints")
    images = torch.randint(256, (70, 8, 10, 3), dtype=torch.uint8)
    places = features({"images.main": images})
    for first in (0, 32, 69):
        torch.testing.assert_close(features({"images.main": images[first : first + 1]})[0], places[first])
    assert features({"images.main": images[:0]}).shape == (0, places.shape[1])


@torch.no_grad()
def test_critics_take_features_that_were_computed_before() -> None:
    torch.manual_seed(0)
    critics = Critics(EnvSpec(state_size=3, action_size=2, cameras={"main": (16, 16, 3)}), 2, 8, judges_states=True)
    inputs = {"images.main": torch.randint(256, (4, 16, 16, 3), dtype=torch.uint8), "states": torch.randn(4, 3)}
    actions, encoded = torch.randn(4, 2), critics.encoded(inputs)
    values, of_states = critics(inputs, actions), critics.of_states(inputs)
    for weight in critics.features.parameters():
        weight.zero_()
    assert torch.equal(critics(encoded, actions), values)
    assert torch.equal(critics.of_states(encoded), of_states)
    assert not torch.equal(critics(inputs, actions), values)
    states = {"states": torch.randn(4, 5)}
    assert Critics(SPEC, 2, 8).encoded(states) is states


def test_layer_norm_bounds_values_of_actions_far_from_any_seen() -> None:
    """Ball et al. 2023: a layer norm bounds the value by the weights behind it, whatever the action."""
    torch.manual_seed(0)
    inputs, far = {"states": torch.zeros(1, 5)}, 1e4 * torch.ones(1, 2)
    plain, bounded = (Critics(SPEC, 2, 16, norm=norm)(inputs, far).abs().max() for norm in ("none", "layer"))
    assert plain > 10
    assert bounded < 10


def test_batch_renorm_starts_as_batch_norm() -> None:
    torch.manual_seed(0)
    layer = BatchRenorm(1, 3, warmup=100)
    for _ in range(100):
        batch = 2 + 3 * torch.randn(1, 64, 3)
        result = layer(batch)
        torch.testing.assert_close(result.mean(dim=1), torch.zeros(1, 3), atol=1e-5, rtol=0)
        torch.testing.assert_close(result.var(dim=1, correction=0), torch.ones(1, 3), atol=1e-3, rtol=0)
    # Afterwards a batch is normalized as in evaluation, within the bounds of the correction.
    batch = 2 + 3 * torch.randn(1, 64, 3)
    mean, deviation = layer.mean.clone(), layer.deviation.clone()
    torch.testing.assert_close(layer(batch), (batch - mean) / deviation, atol=1e-4, rtol=1e-4)
    layer.eval()
    torch.testing.assert_close(layer(batch), (batch - layer.mean) / layer.deviation)


N, CHUNK, ACTIONS, STEPS = 5, 2, 3, 4
STATES = EnvSpec(6, ACTIONS)


def made(spec: EnvSpec = STATES, **model: Any) -> BasePolicy:
    torch.manual_seed(0)
    inputs = {"model_type": "flow_policy", "hidden_dim": 16, "num_action_chunks": CHUNK, "options": {"steps": STEPS}}
    return make_model(policy_model({**inputs, **model}), spec)


def observed() -> dict[str, Any]:
    return {"states": np.random.default_rng(0).normal(size=(N, 6)).astype(np.float32)}


def test_velocities_are_computed_once_to_act(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made()
    inputs = policy.prepare(observed())
    counted: list[int] = []
    computed = policy._flow  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(policy, "_flow", lambda *arguments: (counted.append(1), computed(*arguments))[1])
    for greedy in (False, True):
        counted.clear()
        output = policy.act(inputs, greedy=greedy)
        assert len(counted) == STEPS
        assert (output.logprobs is None) == greedy


def test_horizons_are_learned_whole_and_hold_what_is_carried_out() -> None:
    policy = made(options={"action_horizon": 7})
    inputs = policy.prepare(observed())
    assert policy.imitation_losses(inputs, torch.zeros(N, policy.horizon, ACTIONS)).shape == (N, 7, ACTIONS)
    with pytest.raises(ConfigError, match="predicts 1 actions, but `num_action_chunks` is 2"):
        made(options={"action_horizon": 1})
    with pytest.raises(ConfigError, match="continuous actions"):
        made(EnvSpec(4, 1, num_choices=2))


def velocity(x: Tensor, time: Tensor) -> Tensor:
    return x.sin() + time[:, None]


def test_one_noisy_step_leaves_the_others_as_they_are() -> None:
    """Between the first noise and the step that was drawn the flow is the ordinary one, and so it is after it."""
    sde = OneStepSde(5, 0.8)

    record, logprobs = sde.draw(velocity, torch.zeros(400, 2), torch.Generator().manual_seed(0))
    before, after, index, sample = record
    chosen = index[:, 0]
    assert [int((chosen == step).sum()) > 50 for step in range(5)] == [True] * 5
    t, sigma = index / 5, 0.8 * (1 - index / 5).sqrt()
    v = before.sin() + t
    mean = before + (v + sigma**2 / 2 * -(before - t * v) / (1 - t)) / 5
    torch.testing.assert_close(logprobs[0], Normal(mean, sigma * (1 / 5) ** 0.5).log_prob(after))
    torch.testing.assert_close(sde.entropies(record)[0], Normal(mean, sigma * (1 / 5) ** 0.5).entropy())
    x = after
    for step in range(1, 5):
        x = torch.where(index < step, x + velocity(x, torch.full((400,), step / 5)) / 5, x)
    torch.testing.assert_close(x, sample)


def test_log_probabilities_are_those_of_normal_distributions() -> None:
    sde, chain = FlowSde(3, 0.7), torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(0))

    wanted: list[Tensor] = []
    for index in range(3):
        t, x = index / 3, chain[index]
        v, sigma = x.sin() + t, 0.7 * (1 - t) ** 0.5
        score = -(x - t * v) / (1 - t)
        mean = x + (v + sigma**2 / 2 * score) / 3
        wanted.append(Normal(mean, sigma * (1 / 3) ** 0.5).log_prob(chain[index + 1]))
    torch.testing.assert_close(sde.logprobs(velocity, chain), torch.stack(wanted))
    torch.testing.assert_close(sde.entropies(chain)[1, 0, 0], Normal(0.0, 0.7 * (2 / 9) ** 0.5).entropy())


def test_noise_leaves_the_distribution_as_it_is() -> None:
    """Samples of mean 2 and deviation 0.5, whose velocity is known: the flow with noise gets there as well."""
    mean, deviation = 2.0, 0.5

    def known(x: Tensor, time: Tensor) -> Tensor:
        t = time[:, None]
        variance = (1 - t) ** 2 + (t * deviation) ** 2
        return mean + (t * deviation**2 - (1 - t)) / variance * (x - t * mean)

    generator = torch.Generator().manual_seed(0)
    for sde in (FlowSde(100, 0.0001), FlowSde(100, 1.0), OneStepSde(100, 1.0)):
        ends = sde.draw(known, torch.zeros(20_000, 1), generator)[0][-1]
        assert float(ends.mean()) == pytest.approx(mean, abs=0.03)
        assert float(ends.std()) == pytest.approx(deviation, abs=0.03)


def test_it_learns_two_ways_to_act() -> None:
    """Half of the demonstrations go left and half right: a mean of both would be neither."""
    policy = made(EnvSpec(6, 1), num_action_chunks=1, hidden_dim=32, options={"steps": 10, "noise": 0.3})
    inputs = {"states": torch.zeros(256, 6)}
    wanted = policy.from_env(np.where(np.arange(256) % 2, 0.8, -0.8).astype(np.float32).reshape(256, 1, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(300):
        loss = policy.imitation_losses(inputs, wanted).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    result = policy.to_env(policy.act(inputs).actions).flatten()
    assert np.median(np.abs(np.abs(result) - 0.8)) < 0.15
    assert 0.3 < (result > 0).mean() < 0.7


SIZE = 28
SHAPES = [(28, 28), (48, 64), (64, 48), (20, 26), (14, 14), (37, 91)]


def pictures(height: int, width: int) -> NDArray[np.uint8]:
    """Return two pictures with smooth and sharp parts."""
    rows, columns = np.mgrid[:height, :width]
    smooth = np.stack((rows * 255 / height, columns * 255 / width, (rows + columns) % 40 * 6), axis=-1)
    noisy = np.random.default_rng(0).integers(0, 256, (height, width, 3))
    return np.stack((smooth, noisy)).astype(np.uint8)


def within(height: int, width: int) -> tuple[int, int]:
    ratio = max(width / SIZE, height / SIZE)
    return int(height / ratio), int(width / ratio)


def centred(resized: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return pictures in the middle of black ones, in colours from -1 to 1."""
    _, height, width, _ = resized.shape
    whole = np.zeros((len(resized), SIZE, SIZE, 3))
    top, left = (SIZE - height) // 2, (SIZE - width) // 2
    whole[:, top : top + height, left : left + width] = resized
    return whole / 127.5 - 1


def between_pixels(images: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.float64]:
    """Return the bilinear mean of the four pixels around each point, written out."""
    _, height, width, _ = images.shape
    kept: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
    for wanted, edge in zip(size, (height, width), strict=True):
        at = np.clip((np.arange(wanted) + 0.5) * edge / wanted - 0.5, 0, None)
        low = np.minimum(at.astype(np.int64), edge - 1)
        kept.append((low, np.minimum(low + 1, edge - 1), at - low))
    (top, bottom, down), (left, right, along) = kept
    above = images[:, top][:, :, left] * (1 - along)[:, None] + images[:, top][:, :, right] * along[:, None]
    below = images[:, bottom][:, :, left] * (1 - along)[:, None] + images[:, bottom][:, :, right] * along[:, None]
    return above * (1 - down)[:, None, None] + below * down[:, None, None]


def pixels_of(images: NDArray[np.uint8], resizing: str) -> NDArray[np.float32]:
    return ImagePipeline((SIZE, SIZE), resizing).pixels(torch.from_numpy(images)).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_of_lerobot_equal_its_formula(shape: tuple[int, int]) -> None:
    images = pictures(*shape)
    wanted = centred(between_pixels(images, within(*shape)))
    np.testing.assert_allclose(pixels_of(images, "lerobot"), wanted, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_of_openpi_equal_those_of_pil(shape: tuple[int, int]) -> None:
    """PIL computes in whole numbers: a few colours may differ by one of 255."""
    images, (height, width) = pictures(*shape), within(*shape)
    resized = [
        np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)) for image in images
    ]
    difference = np.abs(pixels_of(images, "openpi") - centred(np.stack(resized).astype(np.float64)))
    assert difference.max() <= 1 / 127.5 + 1e-5
    assert (difference > 1e-3).mean() < 0.02


@pytest.mark.parametrize("shape", [(28, 28), (48, 64), (64, 48)], ids=str)
def test_images_of_transformers_are_padded_at_the_end(shape: tuple[int, int]) -> None:
    images, (height, width) = pictures(*shape), within(*shape)
    resized = [np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)) for image in images]
    output = pixels_of(images, "transformers")
    np.testing.assert_allclose(output[:, :height, :width], np.stack(resized) / 127.5 - 1, atol=0.02)
    assert not output[:, height:].any()
    assert not output[:, :, width:].any()


def test_colours_are_those_of_the_settings(tmp_path: Path) -> None:
    images = ImagePipeline((8, 8), "openpi", (0.1, 0.2, 0.3), (0.5, 0.25, 1.0))
    images.save(tmp_path)
    assert ImagePipeline.load(str(tmp_path), (8, 8), "transformers") == images
    output = images.pixels(torch.full((1, 8, 8, 3), 51, dtype=torch.uint8))
    torch.testing.assert_close(output[0, :, 0, 0], torch.tensor([0.2, 0.0, -0.1]))


CLIP: dict[str, Any] = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
HALVES: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.mark.parametrize(
    ("files", "scale"),
    [
        ({"preprocessor_config.json": CLIP}, CLIP),
        ({"processor_config.json": {"image_processor": CLIP, "patch_size": 14}}, CLIP),
        ({"processor_config.json": CLIP}, CLIP),
        ({"preprocessor_config.json": CLIP, "processor_config.json": {"image_processor": None}}, CLIP),
        ({"processor_config.json": {"patch_size": 14}}, HALVES),
        ({}, HALVES),
    ],
)
def test_colours_are_those_of_the_folders_processor(files: Any, scale: dict[str, Any], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    images = ImagePipeline.load(str(tmp_path), (8, 8), "transformers")
    assert (images.mean, images.deviation) == (tuple(scale["image_mean"]), tuple(scale["image_std"]))


def test_unknown_ways_to_resize_are_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0], "resizing": "folded"}')
    with pytest.raises(ConfigError, match="resizes images as `folded`"):
        ImagePipeline.load(str(tmp_path), (8, 8), "transformers")
