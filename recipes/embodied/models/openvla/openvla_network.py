"""The network of OpenVLA, from classes of transformers: DINOv2 with registers, SigLIP, a projection, and a Llama."""

# transformers is largely untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.embodied.models.openvla.openvla_folder import OpenVlaShape, TowerSizes
from recipes.sections.actor import LoraSettings
from recipes.training.huggingface import cache_name, with_lora

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
