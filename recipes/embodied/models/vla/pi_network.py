"""The network of pi0.5: transformers' PaliGemma, and an action expert whose norms depend on time (adaRMS).

Its weights have the names and shapes of openpi and lerobot, except for prefixes (`pi_folder`).
"""

# transformers is largely untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn import functional

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import Pi0Options
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.vla.flow_vla import ReadObservation
from recipes.embodied.models.vla.vision_language import HEAD, built_heads, built_image_size, initialize_narrow
from recipes.training.huggingface import cache_name, require_transformers
from rlinf_core import ConfigError
from rlinf_core.config.validating.validation_messages import refusals
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object

KIND: Final = "pi05"
# More than ten times the largest size of any published one.
_Size = Annotated[int, Field(strict=True, ge=1, le=1 << 18)]
_ROTATION: Final = 10_000.0
_EPSILON: Final = 1e-6
# Keys and values of each layer.
Memory = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True)
class GemmaSizes:
    """Sizes of a Gemma with one head of keys and values."""

    width: _Size
    hidden: _Size
    layers: _Size
    heads: _Size
    head_dim: _Size


@dataclass(frozen=True, slots=True)
class PiShape:
    """Sizes of a pi0 or pi0.5, and how it was trained.

    Attributes:
        language: the sizes of the language model's Gemma.
        expert: the sizes of the expert's Gemma; layers, heads and head size are equal.
        vision: width, hidden width, layers and heads of the SigLIP.
        image, patch: height and width, in pixels.
        vocabulary: the number of tokens.
        actions: the padded size of an action.
        horizon: the number of actions predicted together.
        steps: the number of steps from noise to actions.
        prompt_states: the size of a state in a prompt; shorter states are padded with 0. 0: no padding.
        beta, scale, offset: the distribution of training times: the share of noise is offset + scale * Beta(*beta).
        periods: the shortest and the longest period of the time embedding.
    """

    language: GemmaSizes
    expert: GemmaSizes
    vision: tuple[_Size, _Size, _Size, _Size]
    image: _Size
    patch: _Size
    vocabulary: Annotated[int, Field(strict=True, ge=1, le=1 << 24)]
    actions: _Size
    horizon: _Size
    steps: _Size = 10
    prompt_states: int = 0
    beta: tuple[float, float] = (1.5, 1.0)
    scale: float = 0.999
    offset: float = 0.001
    periods: tuple[float, float] = (4e-3, 4.0)

    def save(self, folder: Path) -> None:
        """Write `config.json` into a folder."""
        (folder / "config.json").write_text(json.dumps({"model_type": KIND, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> PiShape:
        """Return the shape that `save` wrote into a folder.

        Raises:
            ConfigError: the folder has no valid shape.
        """
        try:
            return TypeAdapter(cls).validate_python(load_json_object(read_bounded(folder / "config.json")))
        except (OSError, ValueError) as error:
            why = refusals(error, "config.json")[0] if isinstance(error, ValidationError) else str(error)
            raise ConfigError(
                f"`{folder}` describes no pi0.5", why=why, help="copy the policy's folder again"
            ) from None


class Pi05Network(nn.Module):
    """PaliGemma, expert, and the projections of actions and time, with new weights."""

    def __init__(self, shape: PiShape) -> None:
        super().__init__()
        self.shape = shape
        config = paligemma_config(shape)
        from transformers import AutoModel

        self.vlm: Any = AutoModel.from_config(config)
        self.expert = Expert(shape.expert)
        width = shape.expert.width
        self.action_in_proj = nn.Linear(shape.actions, width)
        self.action_out_proj = nn.Linear(width, shape.actions)
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    def velocity(self, memory: Memory, mask: Tensor, chunk: Tensor, noise_share: Tensor) -> Tensor:
        """Return the velocity toward noise, [n, H, M].

        Args:
            memory: keys and values of the prefix, by layer.
            mask: bool [n, P], what of the prefix is not padding.
            chunk: [n, H, M].
            noise_share: the time in pi0.5's convention, float32 [n]: 1 is noise.
        """
        waves = _waves(noise_share, self.shape.expert.width, self.shape.periods).to(self.time_mlp_in.weight.dtype)
        time = functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(waves))))
        return self.action_out_proj(self.expert(self.action_in_proj(chunk), time, memory, mask))


class AdaptiveNorm(nn.Module):
    """RMS normalization whose scale, shift and gate come from a condition."""

    def __init__(self, width: int, condition: int) -> None:
        super().__init__()
        self.dense = nn.Linear(condition, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Return [n, H, W] normalized, and the gate [n, 1, W] for the block's output."""
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, dim=-1)
        exact = x.float()
        normed = exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + _EPSILON)
        return (normed * (1 + scale.float()) + shift.float()).to(x.dtype), gate


class Expert(nn.Module):
    """A Gemma with adaptive norms, which attends to the prefix and, bidirectionally, to itself."""

    def __init__(self, sizes: GemmaSizes) -> None:
        super().__init__()
        self._head_dim = sizes.head_dim
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.layers))
        self.norm = AdaptiveNorm(sizes.width, sizes.width)

    def forward(self, x: Tensor, condition: Tensor, memory: Memory, mask: Tensor) -> Tensor:
        """Return hidden states [n, H, W] of actions [n, H, W]."""
        first = mask.sum(dim=1, keepdim=True)
        rotation = _rotation(first + torch.arange(x.shape[1], device=x.device), self._head_dim)
        seen = torch.cat((mask, mask.new_ones(x.shape[:2])), dim=1)[:, None, None]
        for layer, (keys, values) in zip(self.layers, memory, strict=True):
            x = layer(x, condition, (keys, values), rotation, seen)
        return self.norm(x, condition)[0]


class _Layer(nn.Module):
    def __init__(self, sizes: GemmaSizes) -> None:
        super().__init__()
        self.self_attn = _Attention(sizes)
        self.mlp = _Mlp(sizes)
        self.input_layernorm = AdaptiveNorm(sizes.width, sizes.width)
        self.post_attention_layernorm = AdaptiveNorm(sizes.width, sizes.width)

    def forward(
        self, x: Tensor, condition: Tensor, memory: tuple[Tensor, Tensor], rotation: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """Return hidden states [n, H, W]."""
        normed, gate = self.input_layernorm(x, condition)
        x = x + self.self_attn(normed, memory, rotation, seen) * gate
        normed, gate = self.post_attention_layernorm(x, condition)
        return x + self.mlp(normed) * gate


class _Attention(nn.Module):
    def __init__(self, sizes: GemmaSizes) -> None:
        super().__init__()
        self._heads, self._head_dim = sizes.heads, sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(sizes.width, sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(sizes.width, sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.width, bias=False)

    def forward(
        self, x: Tensor, memory: tuple[Tensor, Tensor], rotation: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """Return the output of attention, [n, H, W]."""
        queries = self.q_proj(x).unflatten(-1, (self._heads, self._head_dim)).transpose(1, 2)
        keys, values = self.k_proj(x)[:, None], self.v_proj(x)[:, None]
        keys = torch.cat((memory[0].to(keys.dtype), _rotated(keys, rotation)), dim=2)
        values = torch.cat((memory[1].to(values.dtype), values), dim=2)
        shape = (-1, self._heads, -1, -1)
        mixed = functional.scaled_dot_product_attention(
            _rotated(queries, rotation), keys.expand(shape), values.expand(shape), attn_mask=seen
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, sizes: GemmaSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down_proj = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, H, W]."""
        return self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


def initialize_built(network: Pi05Network) -> None:
    """Initialize the weights of a small network that is trained from scratch."""
    initialize_narrow(network)
    for module in network.modules():
        if isinstance(module, AdaptiveNorm):
            # No scale and no shift; every layer's gate is open.
            nn.init.zeros_(module.dense.weight)
            nn.init.zeros_(module.dense.bias)
            nn.init.ones_(module.dense.bias[-module.dense.out_features // 3 :])


def _waves(time: Tensor, width: int, periods: tuple[float, float]) -> Tensor:
    """Return sines and cosines of a time, float32 [n, width]."""
    shares = torch.linspace(0, 1, width // 2, device=time.device, dtype=torch.float32)
    angles = time[:, None] * (2 * math.pi / (periods[0] * (periods[1] / periods[0]) ** shares))
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def _rotation(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary embeddings, float32 [n, 1, H, size]."""
    shares = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    angles = positions[:, None, :, None].float() * _ROTATION**-shares
    whole = torch.cat((angles, angles), dim=-1)
    return whole.cos(), whole.sin()


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * rotation[0] + turned * rotation[1]).to(x.dtype)


def paligemma_config(shape: PiShape) -> Any:
    """Return the configuration of the PaliGemma of transformers."""
    require_transformers()
    from transformers import PaliGemmaConfig

    sizes, (width, hidden, layers, heads) = shape.language, shape.vision
    text: dict[str, Any] = {
        "model_type": "gemma",
        "hidden_size": sizes.width,
        "intermediate_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": 1,
        "head_dim": sizes.head_dim,
        "vocab_size": shape.vocabulary,
    }
    vision: dict[str, Any] = {
        "model_type": "siglip_vision_model",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": shape.image,
        "patch_size": shape.patch,
        "vision_use_head": False,
    }
    return PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=sizes.width)


def read_prefix(vlm: Any, images: Sequence[Tensor], tokens: Tensor, mask: Tensor) -> ReadObservation:
    """Encode images and a prompt by transformers' PaliGemma, with bidirectional attention.

    Args:
        vlm: the model without a head for words.
        images: the images of each camera, float [n, 3, H, W].
        tokens: the tokens of the prompt, int64 [n, T].
        mask: bool [n, T], tokens that are not padding.
    """
    dtype = next(vlm.vision_tower.parameters()).dtype
    words = vlm.get_input_embeddings()(tokens)
    seen = [vlm.get_image_features(image.to(dtype)).pooler_output.to(words.dtype) for image in images]
    embedded = torch.cat((*seen, words), dim=1)
    mask = torch.cat((mask.new_ones((len(mask), embedded.shape[1] - mask.shape[1])), mask), dim=1)
    output = vlm(
        inputs_embeds=embedded,
        attention_mask=mask.long(),
        position_ids=mask.long().cumsum(dim=1) - 1,
        token_type_ids=torch.zeros_like(mask, dtype=torch.long),
        use_cache=True,
    )
    weights = (mask / mask.sum(dim=1, keepdim=True))[..., None].to(output.last_hidden_state.dtype)
    memory = tuple((layer.keys, layer.values) for layer in getattr(output, cache_name(vlm.forward)).layers)
    return ReadObservation((output.last_hidden_state * weights).sum(dim=1), memory, mask)


def built_shape(config: EmbodiedModelConfig, options: Pi0Options, spec: EnvSpec, vocabulary: int) -> PiShape:
    """Return the sizes of a small model, whose expert is half as wide as its language model.

    Raises:
        ConfigError: the sizes do not divide evenly.
    """
    width, layers, heads = config.hidden_dim, options.num_layers, built_heads(config.hidden_dim)
    return PiShape(
        language=GemmaSizes(width, 2 * width, layers, heads, HEAD),
        expert=GemmaSizes(width // 2, width, layers, heads, HEAD),
        vision=(width, 2 * width, layers, heads),
        image=built_image_size(spec, options.patch_size),
        patch=options.patch_size,
        vocabulary=vocabulary,
        actions=spec.action_size,
        horizon=options.action_horizon or config.num_action_chunks,
        steps=4,
    )
