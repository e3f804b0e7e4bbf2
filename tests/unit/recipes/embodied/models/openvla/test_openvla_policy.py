"""OpenVLA and OpenVLA-OFT from a folder in the published layout, against formulas of their papers and code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.policy_folder import BACKBONE, save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.vla.openvla_network import DINO, SIGLIP
from recipes.embodied.models.vla.vision_language import ImagePipeline, centre_crop
from rlinf_core import ConfigError
from tests.unit.recipes.embodied.models.openvla import openvla_folder

CHUNK, ACTIONS, N = 2, 4, 3
HEADS = 16


def features(weights: dict[str, Tensor], tower: str, pictures: Tensor) -> Tensor:
    """Return what the second to last layer gives for the patches of pictures [n, 3, H, W]."""
    own = {name.removeprefix(f"{tower}."): weight for name, weight in weights.items() if name.startswith(f"{tower}.")}
    kernel = own["patch_embed.proj.weight"]
    patches = functional.conv2d(pictures, kernel, own["patch_embed.proj.bias"], stride=kernel.shape[-1])
    hidden = patches.flatten(2).transpose(1, 2) + own["pos_embed"]
    before = [own[name].expand(len(hidden), -1, -1) for name in ("cls_token", "reg_token") if name in own]
    hidden = torch.cat([*before, hidden], dim=1)
    depth = 1 + max(int(name.split(".")[1]) for name in own if name.startswith("blocks."))
    for layer in range(depth - 1):
        block = {name.removeprefix(f"blocks.{layer}."): weight for name, weight in own.items()}
        hidden = hidden + scaled(block, "ls1", attended(block, normed(block, "norm1", hidden)))
        hidden = hidden + scaled(block, "ls2", between(block, normed(block, "norm2", hidden)))
    return hidden[:, sum(part.shape[1] for part in before) :]


def normed(block: dict[str, Tensor], name: str, hidden: Tensor) -> Tensor:
    return functional.layer_norm(hidden, hidden.shape[-1:], block[f"{name}.weight"], block[f"{name}.bias"], 1e-6)


def scaled(block: dict[str, Tensor], name: str, hidden: Tensor) -> Tensor:
    return hidden * block[f"{name}.scale_factor"] if f"{name}.scale_factor" in block else hidden


def attended(block: dict[str, Tensor], hidden: Tensor) -> Tensor:
    count, length, width = hidden.shape
    qkv = hidden @ block["attn.qkv.weight"].T + block["attn.qkv.bias"]
    query, key, value = qkv.view(count, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
    shares = (query @ key.transpose(-1, -2) / (width // HEADS) ** 0.5).softmax(dim=-1)
    joined = (shares @ value).transpose(1, 2).reshape(count, length, width)
    return joined @ block["attn.proj.weight"].T + block["attn.proj.bias"]


def between(block: dict[str, Tensor], hidden: Tensor) -> Tensor:
    inner = functional.gelu(hidden @ block["mlp.fc1.weight"].T + block["mlp.fc1.bias"])
    return inner @ block["mlp.fc2.weight"].T + block["mlp.fc2.bias"]


def projected(weights: dict[str, Tensor], patches: Tensor) -> Tensor:
    """Return embeddings of the language model of features of both towers."""
    for layer in (1, 2, 3):
        patches = patches @ weights[f"projector.fc{layer}.weight"].T + weights[f"projector.fc{layer}.bias"]
        patches = functional.gelu(patches) if layer < 3 else patches
    return patches


SIZE = openvla_folder.PIXELS
SPEC = EnvSpec(0, ACTIONS, cameras={"main": (SIZE, SIZE, 3), "wrist": (SIZE, SIZE, 3)}, has_instructions=True)
KINDS = ("openvla", "openvla_oft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("openvla") / "model"
    openvla_folder.write(made)
    return made


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return openvla_folder.write(tmp_path_factory.mktemp("weights") / "model")


def config_of(kind: str, folder: Path | None, **model: Any) -> EmbodiedModelConfig:
    path = None if folder is None else str(folder)
    model = {"model_type": kind, "model_path": path, "num_action_chunks": CHUNK, "hidden_dim": 32, **model}
    return policy_model(model)


def made(kind: str, folder: Path | None, **model: Any) -> Any:
    torch.manual_seed(0)
    return make_model(config_of(kind, folder, **model), SPEC)


def seen(count: int = N) -> dict[str, Any]:
    random = np.random.default_rng(1)
    return {
        "images.main": random.integers(0, 256, (count, SIZE, SIZE, 3), np.uint8),
        "images.wrist": random.integers(0, 256, (count, SIZE, SIZE, 3), np.uint8),
        "instructions": np.array(["Pick up the RED block", "push", "open the drawer"][:count]),
    }


def test_towers_and_projection_equal_their_formulas(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    policy = made("openvla", folder)
    first, second = policy.pixels(torch.from_numpy(seen()["images.main"]))
    wanted = torch.cat((features(weights, DINO, first), features(weights, SIGLIP, second)), dim=2)
    with torch.no_grad():
        ours = policy.vlm.embed_pictures(first, second)
    assert torch.allclose(ours, projected(weights, wanted), atol=1e-4, rtol=1e-4)


def test_each_tower_gets_its_own_colours(folder: Path) -> None:
    pictures = seen()["images.main"]
    first, second = made("openvla", folder).pixels(torch.from_numpy(pictures))
    parts = pictures.transpose(0, 3, 1, 2) / 255
    mean, deviation = (np.array(row)[:, None, None] for row in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert np.allclose(first.numpy(), (parts - mean) / deviation, atol=1e-5)
    assert np.allclose(second.numpy(), (parts - 0.5) / 0.5, atol=1e-5)


def test_another_size_is_resized_as_pil_does() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (48, 60, 3), np.uint8)
    wanted = np.asarray(Image.fromarray(picture).resize((SIZE, SIZE), Image.Resampling.BICUBIC), np.float32)
    ours = ImagePipeline((SIZE, SIZE), "openvla").resized(torch.from_numpy(picture[None]))[0].permute(1, 2, 0)
    assert np.abs(ours.numpy() - wanted).max() <= 1


def test_centre_crop_is_bilinear_between_corners() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (10, 12, 3)).astype(np.float64)
    ours = centre_crop(torch.from_numpy(picture).permute(2, 0, 1)[None].float(), 0.9)[0].permute(1, 2, 0).numpy()
    edge = 0.9**0.5
    begin = (1 - edge) / 2
    wanted = np.zeros_like(picture)
    for row in range(10):
        for column in range(12):
            y = begin * 9 + row * edge * 9 / 9
            x = begin * 11 + column * edge * 11 / 11
            up, left = int(y), int(x)
            down, right = min(up + 1, 9), min(left + 1, 11)
            above = picture[up, left] * (1 - x + left) + picture[up, right] * (x - left)
            below = picture[down, left] * (1 - x + left) + picture[down, right] * (x - left)
            wanted[row, column] = np.floor((above * (1 - y + up) + below * (y - up)) / 255 * 255.5)
    assert np.abs(ours - wanted).max() <= 1
    assert (ours == wanted).mean() > 0.99


def test_tokens_become_actions_by_openvlas_formula(folder: Path) -> None:
    policy = made("openvla", folder)
    rows = policy.vlm.vocabulary
    indices = torch.arange(256).repeat(ACTIONS, 1).T.reshape(128, CHUNK, ACTIONS)
    ours = policy.to_env(indices)
    # As published: token ids, edges, middles, quantiles and the mask.
    ids = indices.numpy() + rows - 256
    edges = np.linspace(-1, 1, 256)
    middles = (edges[:-1] + edges[1:]) / 2
    normalized = middles[np.clip(rows - ids - 1, 0, 254)]
    about = openvla_folder.STATISTICS["libero_spatial"]["action"]
    low, high = np.array(about["q01"]), np.array(about["q99"])
    wanted = np.where(about["mask"], 0.5 * (normalized + 1) * (high - low) + low, normalized)
    assert np.abs(ours - wanted).max() < 1e-6
    again = policy.from_env(ours)
    # The last two tokens have one middle.
    assert torch.equal(again[indices > 0], indices[indices > 0])


def test_the_gripper_opens_at_one(folder: Path) -> None:
    policy = made("openvla", folder, options={"gripper": "opening"})
    actions = np.zeros((1, CHUNK, ACTIONS), np.float32)
    actions[..., -1] = [[-1, 1]]  # opened, closed
    tokens = policy.from_env(actions)
    as_it_is = made("openvla", folder).to_env(tokens)[..., -1]
    assert np.allclose(as_it_is, [[1, 0]], atol=1 / 200)
    assert np.array_equal(policy.to_env(tokens)[..., -1], [[-1, 1]])


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_is_of_what_is_drawn_alone(kind: str, folder: Path) -> None:
    policy = made(kind, folder, options={"temperature": 1.6})
    inputs = policy.prepare(seen())
    drawn = policy.act(inputs, generator=torch.Generator().manual_seed(0))
    judged = policy(inputs, drawn.actions)
    assert torch.allclose(judged.logprobs, drawn.logprobs, atol=1e-4)
    losses = policy.imitation_losses(inputs, drawn.actions)
    assert torch.allclose(losses, -made(kind, folder)(inputs, drawn.actions).logprobs, atol=1e-5)
    assert not torch.allclose(losses, -judged.logprobs, atol=1e-2)


def test_oft_reads_a_chunk_as_published(folder: Path) -> None:
    """Placeholders of zeros, then the end mark; attention both ways; a token is read where the one before stands."""
    policy = made("openvla_oft", folder)
    rows = {name: value[:1] for name, value in seen().items()}
    inputs = policy.prepare(rows)
    words = policy.tokenizer
    text = "In: What action should the robot take to pick up the red block?\nOut:"
    prompt = words(text, add_special_tokens=False)["input_ids"] + [words.convert_tokens_to_ids("\u2581")]
    llama = policy.vlm.base
    table = llama.get_input_embeddings().weight
    patches = policy.vlm.embed_pictures(*policy.pixels(inputs["images.main"]))[0]
    begin, end = table[words.bos_token_id][None], table[words.eos_token_id][None]
    count = CHUNK * ACTIONS
    sequence = torch.cat((begin, patches, table[prompt], torch.zeros(count, table.shape[1]), end))[None]
    length = sequence.shape[1]
    hidden = llama.model(
        inputs_embeds=sequence, attention_mask=torch.zeros(1, 1, length, length), use_cache=False
    ).last_hidden_state[0]
    first = 1 + len(patches) + len(prompt)
    logits = hidden[first - 1 : first - 1 + count] @ llama.lm_head.weight.T
    ids = logits[:, policy.vlm.vocabulary - 256 : policy.vlm.vocabulary].argmax(dim=1)
    assert torch.equal(policy.act(inputs, greedy=True).actions.flatten(), ids)


@pytest.mark.parametrize("trained", [True, False])
def test_values_train_the_layers_below_them_where_that_is_wanted(trained: bool) -> None:
    policy = made("openvla", None, options={"value_gradient": trained})
    inputs = policy.prepare(seen())
    policy(inputs, policy.act(inputs).actions).values.sum().backward()
    touched = {name for name, weight in policy.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert any(name.startswith("critic.") for name in touched)
    assert any(not name.startswith("critic.") for name in touched) == trained


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="images"):
        make_model(config_of("openvla", None), EnvSpec(4, 2))
    save_policy(made("openvla", None), config_of("openvla", None), SPEC, tmp_path)
    wider = replace(SPEC, cameras={"main": (40, 40, 3)})
    other = make_model(config_of("openvla", tmp_path), wider)  # resized as at first
    assert other.vlm.dino.embeddings.patch_embeddings.num_patches == 16
    small = config_of("mlp_policy", tmp_path)
    with pytest.raises(ConfigError, match="another policy"):
        make_model(small, EnvSpec(4, 2))
    (tmp_path / "policy.json").unlink()
    with pytest.raises(ConfigError, match="holds no policy"):
        make_model(small, EnvSpec(4, 2))


def test_a_camera_is_chosen_by_name(folder: Path) -> None:
    two = made("openvla_oft", folder, options={"cameras": ["wrist", "main"]})
    assert [key for key in two.prepare(seen()) if key.startswith("images")] == ["images.wrist", "images.main"]
    with pytest.raises(ConfigError, match="no camera `left`"):
        made("openvla", folder, options={"cameras": ["left"]})


def edited(folder: Path, tmp_path: Path, **about: Any) -> Path:
    """Return a copy of the folder whose config.json says something else."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text()) | about
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_several_data_sets_need_a_name(folder: Path, tmp_path: Path) -> None:
    copy = edited(folder, tmp_path)
    (copy / "dataset_statistics.json").unlink()
    with pytest.raises(ConfigError, match=r"(?s)no single set.*`bridge_orig`, `another`.*data_set"):
        made("openvla", copy)
    assert made("openvla", copy, options={"data_set": "another"}).normalization.actions is not None


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"timm_model_ids": ["vit_large_patch14_clip_336.openai", "x"]}, "clip_336"),
        ({"timm_model_ids": ["vit_so400m_patch14_siglip_224"]}, "one vision tower"),
        ({"text_config": {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 500}}, "do not belong"),
    ],
)
def test_another_model_is_refused(about: dict[str, Any], words: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        made("openvla", edited(folder, tmp_path, **about))


@pytest.mark.parametrize("width", [0, "64", 10**5, None, True])
def test_sizes_that_were_changed_are_refused(width: Any, tmp_path: Path) -> None:
    save_policy(made("openvla", None), config_of("openvla", None), SPEC, tmp_path)
    file = tmp_path / BACKBONE / "config.json"
    about = json.loads(file.read_text())
    about["sizes"]["dino"]["width"] = width
    file.write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="expected a whole number from 1"):
        made("openvla", tmp_path)
