"""The network of OpenVLA (Kim et al., arXiv 2406.09246), and its folders in the published layout: sizes and weights.

The network is of classes of transformers: DINOv2 with registers, SigLIP, a projection, and a Llama. A folder holds:

    config.json                `model_type: openvla`, the Llama's sizes, timm's names of the two vision towers
    model*.safetensors         weights by timm's names of the towers, which are translated
    dataset_statistics.json    quantiles of actions by data set, which `published_statistics` reads
    preprocessor_config.json   color statistics of each tower
    tokenizer*                 the tokenizer of the Llama
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from math import isqrt
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.embodied.models.vla.vision_language import judging_folder, load_renamed
from recipes.sections.actor import LoraSettings
from recipes.sections.model_folders import SETTINGS, whole_number
from recipes.training.huggingface import cache_name, check_folder, refuse_settings, with_lora
from recipes.training.tensor_files import stored_shapes
from recipes.training.without_memory import are_shapes_only
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object

# safetensors is largely untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


DINO, SIGLIP = "vision_backbone.featurizer", "vision_backbone.fused_featurizer"
# Attention heads of timm's models, by prefix of their names: weight shapes do not reveal them.
_HEADS: Final = {"vit_large_patch14_reg4_dinov2": 16, "vit_so400m_patch14_siglip": 16}
# The most tokens of a part of the vocabulary.
_MOST_TOKENS: Final = 100_000
# The largest size in a tower: more than ten times that of any published one.
_LARGEST_SIZE: Final = 65_536
# Weights without effect in towers whose second to last layer is read.
_UNREAD: Final = re.compile(r"(norm\.(weight|bias)|attn_pool\..*|fc_norm\..*|head\..*)")
_NAMES: Final = {
    DINO: (
        ("cls_token", "embeddings.cls_token"),
        ("reg_token", "embeddings.register_tokens"),
        ("patch_embed.proj", "embeddings.patch_embeddings.projection"),
        ("blocks", "layers"),
        ("attn.proj", "attention.o_proj"),
        ("attn", "attention"),
        ("ls1.scale_factor", "layer_scale1.lambda1"),
        ("ls2.scale_factor", "layer_scale2.lambda1"),
    ),
    SIGLIP: (
        ("patch_embed.proj", "embeddings.patch_embedding"),
        ("blocks", "layers"),
        ("attn.proj", "self_attn.out_proj"),
        ("attn", "self_attn"),
        ("norm1", "layer_norm1"),
        ("norm2", "layer_norm2"),
    ),
}
_TOWERS: Final = {DINO: "dino", SIGLIP: "siglip"}


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Sizes of a vision tower.

    Attributes:
        width: the width of an embedding.
        hidden: the width of the hidden layers.
        layers: the number of computed layers: all but the last.
        heads: the number of heads of each layer.
        image: height and width, in pixels.
        patch: height and width of a patch, in pixels.
    """

    width: int
    hidden: int
    layers: int
    heads: int
    image: int
    patch: int


@dataclass(frozen=True, slots=True)
class OpenVlaShape:
    """Sizes of an OpenVLA.

    Attributes:
        dino: the sizes of the DINOv2 with four registers.
        siglip: the sizes of the SigLIP.
        text: configuration of the Llama, as plain data.
        padding: the number of unused tokens at the end of its vocabulary.
        bins: the number of tokens before these that represent action values.
    """

    dino: TowerSizes
    siglip: TowerSizes
    text: Mapping[str, Any]
    padding: int
    bins: int

    def plain(self) -> dict[str, Any]:
        """Return the sizes as plain data, for `of_plain`."""
        return {"model_type": "openvla", "sizes": asdict(self)}

    @classmethod
    def of_plain(cls, data: Mapping[str, Any]) -> OpenVlaShape:
        """Return the sizes from the data of `plain`.

        Raises:
            KeyError, TypeError, ValueError: the data are something else.
        """
        sizes, names = data["sizes"], [field.name for field in fields(TowerSizes)]
        dino, siglip = (
            TowerSizes(*(whole_number(sizes[tower], name, _LARGEST_SIZE) for name in names))
            for tower in ("dino", "siglip")
        )
        if not isinstance(sizes["text"], dict):
            raise TypeError("`text` is no configuration of a language model")
        padding, bins = (whole_number(sizes, name, _MOST_TOKENS) for name in ("padding", "bins"))
        return cls(dino, siglip, sizes["text"], padding, bins)


# The published towers: ViT-L/14 of DINOv2 with registers, and SigLIP's so400m/14.
_PUBLISHED: Final = (TowerSizes(1024, 4096, 23, 16, 224, 14), TowerSizes(1152, 4304, 26, 16, 224, 14))


def read_shape(folder: str) -> OpenVlaShape:
    """Return the sizes of the model in a folder of OpenVLA, or in a folder of `save_policy`.

    Raises:
        ConfigError: the folder holds no such model, or its towers are of another kind.
    """
    check_folder(folder)
    refuse_settings(folder)
    with judging_folder(folder, "OpenVLA", "OpenVLA, such as openvla-7b"):
        about = load_json_object(read_bounded(Path(folder) / SETTINGS), non_finite=True)
        if "sizes" in about:
            return OpenVlaShape.of_plain(about)
        heads = [_heads(str(name)) for name in about["timm_model_ids"]]
        if len(heads) != 2:
            raise ValueError("it has one vision tower, and OpenVLA has two")
        shapes = stored_shapes(_files(folder))
        known = shapes or not are_shapes_only()
        dino, siglip = (_tower(shapes, DINO, heads[0]), _tower(shapes, SIGLIP, heads[1])) if known else _PUBLISHED
        padding = whole_number(about, "pad_to_multiple_of", _MOST_TOKENS)
        bins = whole_number({"n_action_bins": 256, **about}, "n_action_bins", _MOST_TOKENS)
        return OpenVlaShape(dino, siglip, about["text_config"], padding, bins)


def load_network(network: nn.Module, folder: str) -> None:
    """Load the weights in a folder of OpenVLA into a network; every weight must be used.

    Raises:
        ConfigError: the weights are of another model, or cannot be read.
    """
    last = {tower: _depth(stored_shapes(_files(folder)), tower) - 1 for tower in (DINO, SIGLIP)}

    def renamed(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        return translated(name, weight, last)

    def unread(name: str) -> bool:
        return name.endswith("mask_token")  # the mask token of DINOv2's pretraining, which OpenVLA does not use

    load_renamed(network, folder, _files(folder), renamed, unread, kind="an OpenVLA of this shape")


def translated(name: str, weight: Tensor, last: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the network's weights, by name, that a weight of the folder contains; none if it has no effect.

    Args:
        name: the name in the folder.
        weight: the weight of that name.
        last: number of each tower's last layer, which is not computed.
    """
    tower = next((tower for tower in _TOWERS if name.startswith(f"{tower}.")), None)
    if tower is None:
        yield name, weight
        return
    inner = name.removeprefix(f"{tower}.")
    if _UNREAD.fullmatch(inner) or inner.startswith(f"blocks.{last[tower]}."):
        return
    prefix = f"{_TOWERS[tower]}."
    if inner == "pos_embed":
        if tower == SIGLIP:
            yield f"{prefix}embeddings.position_embedding.weight", weight[0]
        else:  # transformers also has an embedding for the class token
            whole = weight.new_zeros(1, weight.shape[1] + 1, weight.shape[2])
            whole[:, 1:] = weight
            yield f"{prefix}embeddings.position_embeddings", whole
        return
    qkv = re.fullmatch(r"(.*attn)\.qkv\.(weight|bias)", inner)
    if qkv is not None:
        for kind, part in zip("qkv", weight.chunk(3), strict=True):
            yield prefix + _renamed(tower, f"{qkv[1]}.{kind}_proj.{qkv[2]}"), part
        return
    yield prefix + _renamed(tower, inner), weight


def _renamed(tower: str, name: str) -> str:
    for theirs, ours in _NAMES[tower]:
        name = re.sub(rf"(^|\.){re.escape(theirs)}(?=\.|$)", rf"\g<1>{ours}", name)
    return name


def _heads(name: str) -> int:
    heads = next((count for begin, count in _HEADS.items() if name.startswith(begin)), None)
    if heads is None:
        raise ValueError(f"the vision tower `{name}` is not one of {', '.join(_HEADS)}")
    return heads


def _tower(shapes: Mapping[str, tuple[int, ...]], tower: str, heads: int) -> TowerSizes:
    width, _, patch, _ = shapes[f"{tower}.patch_embed.proj.weight"]
    return TowerSizes(
        width=width,
        hidden=shapes[f"{tower}.blocks.0.mlp.fc1.weight"][0],
        layers=_depth(shapes, tower) - 1,
        heads=heads,
        image=patch * isqrt(shapes[f"{tower}.pos_embed"][1]),
        patch=patch,
    )


def _depth(shapes: Mapping[str, tuple[int, ...]], tower: str) -> int:
    pattern = re.compile(re.escape(tower) + r"\.blocks\.(\d+)\.")
    return 1 + max((int(match[1]) for match in map(pattern.match, shapes) if match), default=0)


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


# transformers is largely untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


# A class token and four registers precede DINOv2's patches.
_REGISTERS = 4
_BEFORE = 1 + _REGISTERS


class VisionTower(nn.Module):
    """Embeddings and all but the last layer of a vision model of transformers.

    OpenVLA reads the second to last layer, and uses nothing after it.
    """

    def __init__(self, embeddings: nn.Module, layers: nn.ModuleList, skipped: int) -> None:
        super().__init__()
        self.embeddings, self.layers = embeddings, layers
        self._skipped = skipped

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features [n, P, W] of the patches of pictures [n, 3, H, W]."""
        hidden = self.embeddings(pixels)
        for layer in self.layers:
            hidden = layer(hidden, None)
        return hidden[:, self._skipped :]


class Projector(nn.Module):
    """Three layers from features of both towers to embeddings of the language model."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, 4 * features)
        self.fc2 = nn.Linear(4 * features, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Return embeddings [n, P, W] of features [n, P, F]."""
        return self.fc3(functional.gelu(self.fc2(functional.gelu(self.fc1(features)))))


class OpenVlaNetwork(nn.Module):
    """The network, with the methods that an `OpenVlaPolicy` calls.

    Args:
        shape: the sizes of the network.
        lora: adapters of the Llama; None: none.
    """

    def __init__(self, shape: OpenVlaShape, lora: LoraSettings | None) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, LlamaConfig

        self.shape = shape
        self.dino, self.siglip = _dino(shape.dino), _siglip(shape.siglip)
        about = {
            name: value for name, value in shape.text.items() if name not in ("model_type", "torch_dtype", "dtype")
        }
        text = LlamaConfig(**about)
        self.projector = Projector(shape.dino.width + shape.siglip.width, int(text.hidden_size))
        model: Any = AutoModelForCausalLM.from_config(text)
        self._lora = lora
        self._base = [model]  # in a list, since it is already a part of `language_model`
        self.language_model: Any = model

    def add_adapters(self) -> None:
        """Wrap the Llama in adapters, if configured; its weights must already be loaded."""
        if self._lora is not None:
            self.language_model = with_lora(self.base, self._lora)
            for part in (self.dino, self.siglip, self.projector):
                part.requires_grad_(False)

    @property
    def base(self) -> Any:
        """transformers' Llama, without its LoRA wrapper."""
        return self._base[0]

    @property
    def width(self) -> int:
        """Size of an embedding of the language model."""
        return int(self.base.config.hidden_size)

    @property
    def vocabulary(self) -> int:
        """The number of tokens, without the padding of the vocabulary."""
        return int(self.base.config.vocab_size) - self.shape.padding

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of the language model and of both towers."""
        return [*self.base.model.layers, *self.dino.layers, *self.siglip.layers]

    def embed_pictures(self, first: Tensor, second: Tensor) -> Tensor:
        """Return embeddings [n, P, W] of the same images [n, 3, H, W], normalized for DINOv2 and for SigLIP."""
        dtype = self.projector.fc1.weight.dtype
        return self.projector(torch.cat((self.dino(first.to(dtype)), self.siglip(second.to(dtype))), dim=2))

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return embeddings [n, T, W] of tokens int64 [n, T]."""
        return self.base.get_input_embeddings()(tokens)

    def states(
        self, embedded: Tensor, mask: Tensor, memory: Any = None, *, both_ways: bool = False
    ) -> tuple[Tensor, Any]:
        """Return last hidden states [n, T, W], and the cache of keys and values if `memory` is passed.

        Args:
            embedded: [n, T, W].
            mask: bool [n, M + T], what is not padding, including the M cached tokens.
            memory: the cache of an earlier call, or an empty cache of transformers; None: no cache.
            both_ways: whether attention is bidirectional rather than causal.
        """
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -embedded.shape[1] :]
        seen: Tensor = mask
        if both_ways:
            length = embedded.shape[1]
            hidden = torch.zeros_like(mask, dtype=embedded.dtype).masked_fill(~mask, torch.finfo(embedded.dtype).min)
            seen = hidden[:, None, None, :].expand(-1, 1, length, -1)
        name = cache_name(self.base.model.forward)
        output = self.base.model(
            inputs_embeds=embedded,
            attention_mask=seen,
            position_ids=positions,
            use_cache=memory is not None,
            **{name: memory},
        )
        return output.last_hidden_state, getattr(output, name)

    def logits(self, hidden: Tensor, count: int) -> Tensor:
        """Return float32 logits [.., count] of the last `count` tokens of the vocabulary."""
        last = self.vocabulary
        return functional.linear(hidden, self.base.get_output_embeddings().weight[last - count : last]).float()


def _dino(sizes: TowerSizes) -> VisionTower:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    if sizes.hidden % sizes.width:
        raise ValueError(f"the layers between have {sizes.hidden} numbers, no multiple of {sizes.width}")
    config = Dinov2WithRegistersConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        mlp_ratio=sizes.hidden // sizes.width,
        image_size=sizes.image,
        patch_size=sizes.patch,
        num_register_tokens=_REGISTERS,
    )
    model: Any = Dinov2WithRegistersModel(config)
    model.embeddings.mask_token.requires_grad_(False)
    return VisionTower(model.embeddings, model.encoder.layer, _BEFORE)


def _siglip(sizes: TowerSizes) -> VisionTower:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        image_size=sizes.image,
        patch_size=sizes.patch,
        hidden_act="gelu",
    )
    model: Any = SiglipVisionModel(config)
    # transformers before 5 wraps it in one more model.
    inner = getattr(model, "vision_model", model)
    return VisionTower(inner.embeddings, inner.encoder.layers, 0)
