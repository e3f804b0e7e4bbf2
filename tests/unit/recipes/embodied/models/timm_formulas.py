"""The vision towers of OpenVLA by their formulas, in plain tensor operations on weights of timm's names."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

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
