"""OpenVLA and OpenVLA-OFT: towers by timm's formulas, a Llama of transformers, and the loops that were published."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from original import ACTIONS, CHUNK, N, Original, seen_in, spec_of
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[4] / "unit" / "recipes" / "embodied" / "models"))
sys.path.insert(0, str(Path(__file__).parents[4] / "unit" / "recipes" / "embodied" / "models" / "openvla"))
import openvla_folder
import timm_formulas

BINS, SIDE = openvla_folder.BINS, openvla_folder.PIXELS
_COLOURS = (((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,) * 3, (0.5,) * 3))


class Prismatic(nn.Module):
    """The network by its published parts."""

    def __init__(self, folder: Path, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.weights, self.words = weights, AutoTokenizer.from_pretrained(folder)
        text: dict[str, Any] = {
            "hidden_size": openvla_folder.TEXT,
            "intermediate_size": 2 * openvla_folder.TEXT,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        }
        self.vocabulary = len(self.words) + BINS
        head = "language_model."
        own = {name.removeprefix(head): weight for name, weight in weights.items() if name.startswith(head)}
        self.llama = LlamaForCausalLM(LlamaConfig(vocab_size=len(own["lm_head.weight"]), **text))
        self.llama.load_state_dict(own)
        self.eyes = nn.Conv2d(3, 1, 1)  # sees what the first tower sees

    def prefix(self, picture: Any, text: str) -> Tensor:
        """Return embeddings [1, P, W] of the beginning, a picture uint8 [H, W, 3] and a prompt."""
        plain = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 255
        seen: list[Tensor] = []
        for tower, (mean, deviation) in zip(("featurizer", "fused_featurizer"), _COLOURS, strict=True):
            pixels = (plain - torch.tensor(mean)[:, None, None]) / torch.tensor(deviation)[:, None, None]
            if not seen:
                self.eyes(pixels)
            seen.append(timm_formulas.features(self.weights, f"vision_backbone.{tower}", pixels))
        patches = timm_formulas.projected(self.weights, torch.cat(seen, dim=2))[0]
        prompt = self.words(f"In: What action should the robot take to {text.lower()}?\nOut:", add_special_tokens=False)
        tokens = [*prompt["input_ids"], self.words.convert_tokens_to_ids("\u2581")]
        table = self.llama.get_input_embeddings().weight
        return torch.cat((table[self.words.bos_token_id][None], patches, table[tokens]))[None]

    def logits(self, embedded: Tensor, *, both_ways: bool) -> Tensor:
        """Return scores of the tokens of actions, [L, 256]: a fine-tuned model gives others no share."""
        length = embedded.shape[1]
        mask = torch.zeros(1, 1, length, length) if both_ways else torch.ones(1, length, dtype=torch.long)
        hidden = self.llama.model(inputs_embeds=embedded, attention_mask=mask, use_cache=False).last_hidden_state[0]
        return self.llama.lm_head(hidden)[:, self.vocabulary - BINS : self.vocabulary]


def token_model(kind: str, folder: Path) -> Original:
    """Save an OpenVLA in the published layout; return it."""
    network = Prismatic(folder, openvla_folder.write(folder))
    spec = spec_of(SIDE, SIDE)
    seen, count = seen_in(spec), CHUNK * ACTIONS
    about = openvla_folder.STATISTICS["libero_spatial"]["action"]
    low, high, mask = (np.array(about[name]) for name in ("q01", "q99", "mask"))
    edges = np.linspace(-1, 1, BINS)
    middles = (edges[:-1] + edges[1:]) / 2

    def scores(row: int, forced: Tensor | None = None) -> Tensor:
        """Return the scores [C * A, 256] of a row, after the tokens so far or the forced ones."""
        begin = network.prefix(seen["images.main"][row], str(seen["instructions"][row]))
        table, first = network.llama.get_input_embeddings().weight, begin.shape[1] - 1
        if kind == "openvla_oft":
            end = table[network.words.eos_token_id][None, None]
            whole = torch.cat((begin, torch.zeros(1, count, begin.shape[2]), end), dim=1)
            return network.logits(whole, both_ways=True)[first : first + count]
        for place in range(count):
            logits = network.logits(begin, both_ways=False)
            token = logits[-1].argmax() if forced is None else forced[place]
            begin = torch.cat((begin, table[network.vocabulary - BINS + token][None, None]), dim=1)
        return network.logits(begin, both_ways=False)[first : first + count]

    @torch.no_grad()
    def chunk() -> Any:
        ids = torch.stack([scores(row).argmax(dim=1) for row in range(N)]).numpy() + network.vocabulary - BINS
        normalized = middles[np.clip(network.vocabulary - ids - 1, 0, BINS - 2)].reshape(N, CHUNK, ACTIONS)
        return np.where(mask, 0.5 * (normalized + 1) * (high - low) + low, normalized)

    @torch.no_grad()
    def loss(actions: Any) -> float:
        normalized = np.where(mask, 2 * (actions - low) / (high - low) - 1, actions)
        # As its `ActionTokenizer`: edges count from 1, the last tokens of the vocabulary stand for them.
        ids = network.vocabulary - np.digitize(np.clip(normalized, -1, 1), edges)
        tokens = torch.from_numpy(ids - (network.vocabulary - BINS)).reshape(N, count)
        losses = [nn.functional.cross_entropy(scores(row, tokens[row]), tokens[row]) for row in range(N)]
        return float(torch.stack(losses).mean())

    # What comes after the features that are used: the last block, and what pools them.
    unread = ("attn_pool", "blocks.2.", "featurizer.norm.")
    return Original({"model_type": kind, "hidden_dim": 32}, spec, network, CHUNK, chunk, loss, unread)
