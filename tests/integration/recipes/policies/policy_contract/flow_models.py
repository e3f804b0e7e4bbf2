"""pi0, pi0.5 and SmolVLA: lerobot's own classes in small sizes, and openpi's folders of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
from lerobot_small import features
from original import (
    ACTIONS,
    CHUNK,
    N,
    Original,
    lerobot_batch,
    redrawn,
    seen_in,
    spec_of,
    statistics,
)
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from recipes.embodied.config.model_config import policy_model
from recipes.embodied.models.vla.vision_language import built_tokenizer

# openpi resizes by PIL, and lerobot's class, which stands for it, does not: its pictures have the right size.
SIZES = {"lerobot": (24, 40), "openpi": (32, 32)}
SIDE, HORIZON, ROOM, STEPS = 32, 6, 7, 3
_TOKENS = {"pi0": 30, "pi05": 60}


def tokenizer_in(folder: Path) -> Any:
    """Save a tokenizer that marks the beginning of a text, as PaliGemma's does, and return it."""
    words: Any = built_tokenizer()
    begin = words.bos_token
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, words.bos_token_id)]
    )
    words.save_pretrained(str(folder))
    return words


def small_pi(kind: str, shape: Any) -> Any:
    """Return lerobot's policy with small Gemmas and a small SigLIP: its own has two sizes."""
    from importlib import import_module

    module: Any = import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    whole = module.PaliGemmaForConditionalGenerationWithPiGemma

    def small(config: Any) -> Any:
        for name, value in {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "patch_size": 8,
            "projection_dim": 32,
        }.items():
            setattr(config.vision_config, name, value)
        config.projection_dim = config.hidden_size = 32
        config.text_config.vocab_size = 300
        return whole(config=config)

    sizes = {"gemma_2b": (32, 2, 48, 8, 1, 4), "gemma_300m": (16, 2, 24, 8, 1, 4)}
    with (
        mock.patch.object(module, "get_gemma_config", lambda name: module.GemmaConfig(*sizes[name])),
        mock.patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", small),
    ):
        return get_policy_class(kind)(shape)


def pi(kind: str, folder: Path, *, layout: str = "lerobot") -> Original:
    """Save a pi0 or pi0.5 in the layout of lerobot or openpi; return lerobot's own."""
    spec = spec_of(*SIZES[layout])
    shape = make_policy_config(
        kind,
        device="cpu",
        chunk_size=HORIZON,
        n_action_steps=CHUNK,
        max_state_dim=ROOM,
        max_action_dim=ROOM,
        num_inference_steps=STEPS,
        image_resolution=(SIDE, SIDE),
        tokenizer_max_length=_TOKENS[kind],
        **features(*SIZES[layout]),
    )
    theirs = small_pi(kind, shape)
    redrawn(theirs)
    folder.mkdir()
    words = tokenizer_in(folder)
    with mock.patch("lerobot.processor.tokenizer_processor.AutoTokenizer.from_pretrained", return_value=words):
        before, after = make_pre_post_processors(shape, dataset_stats=statistics())
    theirs.save_pretrained(folder)
    if layout == "lerobot":
        before.save_pretrained(folder, config_filename="policy_preprocessor.json")
        after.save_pretrained(folder, config_filename="policy_postprocessor.json")
    else:
        _as_openpi(folder)
    seen = seen_in(spec)
    made = before(lerobot_batch(seen))
    noise = torch.randn(N, HORIZON, ROOM, generator=torch.Generator().manual_seed(5))
    share = torch.tensor([0.2, 0.55, 0.9])

    # lerobot leaves the padding of actions out of its loss; openpi's is of all numbers.
    learned = PolicyFeature(FeatureType.ACTION, (ACTIONS if layout == "lerobot" else ROOM,))

    def chunk() -> Any:
        with mock.patch.object(theirs.model, "sample_noise", return_value=torch.zeros(N, HORIZON, ROOM)):
            predicted = after(theirs.predict_action_chunk(dict(made)).flatten(0, 1))
        return predicted.view(N, HORIZON, ACTIONS)[:, :CHUNK].numpy()

    def loss(actions: Any) -> float:
        shown = before({**lerobot_batch(seen), "action": torch.from_numpy(actions)})
        with (
            mock.patch.object(theirs.model, "sample_noise", return_value=noise),
            mock.patch.object(theirs.model, "sample_time", return_value=share),
            mock.patch.dict(theirs.config.output_features, {"action": learned}),
        ):
            return float(theirs.forward(dict(shown))[0].detach())

    options: dict[str, Any] = {"max_prompt_tokens": _TOKENS[kind], "steps": STEPS}
    # Its expert has embeddings of words that nothing reads, and its language model's head is its embedding.
    unread = ("gemma_expert.lm_head", "gemma_expert.model.embed_tokens", "paligemma.lm_head")
    return Original(
        {"model_type": kind, "options": options}, spec, theirs, HORIZON, chunk, loss, unread, (noise, share)
    )


def _as_openpi(folder: Path) -> None:
    """Turn a folder of lerobot into one that openpi's converter writes."""
    weights = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): weight for name, weight in weights.items()}, folder / "model.safetensors")
    about = {"action_dim": ROOM, "action_horizon": HORIZON, "paligemma_variant": "gemma_2b", "precision": "float32"}
    (folder / "config.json").write_text(json.dumps(about))
    stats = statistics()
    named = {"state": stats["observation.state"], "actions": stats["action"]}
    plain = {
        name: {key: columns[key].double().tolist() for key in ("mean", "std", "q01", "q99")}
        for name, columns in named.items()
    }
    (folder / "assets" / "lab").mkdir(parents=True)
    (folder / "assets" / "lab" / "norm_stats.json").write_text(json.dumps({"norm_stats": plain}))


def smolvla(folder: Path) -> Original:
    """Save a SmolVLA as lerobot does; return its own."""
    from recipes.embodied.models.registry import make_model

    spec = spec_of(*SIZES["lerobot"])
    # lerobot's class reads the vision-language model's folder, which is made here.
    built = make_model(
        policy_model(
            {
                "model_type": "smolvla",
                "hidden_dim": 64,
                "num_action_chunks": CHUNK,
                "options": {"num_layers": 2, "max_prompt_tokens": 30, "action_horizon": HORIZON},
            }
        ),
        spec,
    )
    built.save_files(folder / "made")
    vlm = folder / "made" / "backbone" / "vlm"
    about = json.loads((vlm.parent / "config.json").read_text())
    shape = make_policy_config(
        "smolvla",
        device="cpu",
        chunk_size=HORIZON,
        n_action_steps=CHUNK,
        max_state_dim=ROOM,
        max_action_dim=ROOM,
        num_steps=STEPS,
        resize_imgs_with_padding=tuple(about["resize_imgs_with_padding"]),
        vlm_model_name=str(vlm),
        load_vlm_weights=False,
        tokenizer_max_length=30,
        num_vlm_layers=2,
        expert_width_multiplier=0.5,
        self_attn_every_n_layers=2,
        **features(*SIZES["lerobot"]),
    )
    words: Any = built.tokenizer
    tokens = mock.Mock()
    tokens.tokenizer.fake_image_token_id = words.convert_tokens_to_ids("<fake_token_around_image>")
    tokens.tokenizer.global_image_token_id = words.convert_tokens_to_ids("<global-img>")
    with (
        mock.patch("lerobot.policies.smolvla.smolvlm_with_expert.AutoProcessor.from_pretrained", return_value=tokens),
        mock.patch("lerobot.processor.tokenizer_processor.AutoTokenizer.from_pretrained", return_value=words),
    ):
        theirs: Any = get_policy_class("smolvla")(shape)
        before, after = make_pre_post_processors(shape, dataset_stats=statistics())
    redrawn(theirs)
    theirs.save_pretrained(folder / "published")
    before.save_pretrained(folder / "published", config_filename="policy_preprocessor.json")
    after.save_pretrained(folder / "published", config_filename="policy_postprocessor.json")
    seen = seen_in(spec)
    noise = torch.randn(N, HORIZON, ROOM, generator=torch.Generator().manual_seed(5))
    share = torch.tensor([0.2, 0.55, 0.9])

    def chunk() -> Any:
        theirs.eval()
        made = theirs.predict_action_chunk(dict(before(lerobot_batch(seen))), noise=torch.zeros(N, HORIZON, ROOM))
        return after(made.flatten(0, 1)).view(N, HORIZON, ACTIONS)[:, :CHUNK].numpy()

    def loss(actions: Any) -> float:
        shown = dict(before({**lerobot_batch(seen), "action": torch.from_numpy(actions)}))
        return float(theirs.forward(shown, noise=noise, time=share)[0].detach())

    options = {"vlm_path": str(vlm), "max_prompt_tokens": 30, "steps": STEPS}
    model = {"model_type": "smolvla", "options": options}
    return Original(model, spec, theirs, HORIZON, chunk, loss, (), (noise, share), folder / "published")
