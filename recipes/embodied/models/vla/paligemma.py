"""PaliGemma's reading of an observation, for pi0 and pi0.5."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recipes.embodied.models.vla.flow_vla import ReadObservation
from recipes.training.huggingface import transformer_layers


def read_prefix(vlm: Any, images: Sequence[Tensor], tokens: Tensor, mask: Tensor) -> ReadObservation:
    """Let a PaliGemma of transformers read images and a prompt; all of it sees all of it.

    Args:
        vlm: the model without a head for words.
        images: the images of each camera, float [n, 3, H, W].
        tokens: the tokens of the prompt, int64 [n, T].
        mask: which of them are not padding, bool [n, T].
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
    memory = tuple((layer.keys, layer.values) for layer in output.past_key_values.layers)
    return ReadObservation((output.last_hidden_state * weights).sum(dim=1), memory, mask)


def reading_blocks(policy: nn.Module, vlm: Any) -> list[nn.Module]:
    """Return the parts of a policy whose shards are gathered one at a time, see `BasePolicy.blocks`.

    Layers that read leave keys and values in a memory, and not in what they return: gradients come to their projections
    by another way than through the layer, so that these are parts by themselves.
    """
    reading = list(vlm.language_model.layers)
    parts = [layer for layer in transformer_layers(policy) if all(layer is not other for other in reading)]
    for layer in reading:
        attention = layer.self_attn
        parts += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, layer.mlp]
    return parts
