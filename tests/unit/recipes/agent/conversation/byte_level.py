"""A byte-level tokenizer with a chat template, and a small model for it, as a model's folder holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recipes.language.models.load_model import built_model
from recipes.training.huggingface import load_tokenizer

BEGIN, END = "<|im_start|>", "<|im_end|>"
# A message between two marks; nothing is stripped, so that a conversation can be read back.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Merges are learned from it: some letters and pairs of bytes become tokens, most characters beyond ASCII do not.
TEXT = ("user assistant tool system result calculator the answer is 12 * 34 = 408 ", "naïve 数 数 😀 größer ")


def write_byte_level(folder: Path) -> None:
    """Write a tokenizer of bytes and some merges, and a Qwen2 of one layer, into folders `tokenizer` and `model`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core: Any = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[END, BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXT * 20, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[BEGIN],
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )
    made.save_pretrained(str(folder / "tokenizer"))
    write_model(folder / "model", made)


def write_model(folder: Path, tokenizer: Any) -> None:
    """Write a small model for a tokenizer, which ends its turns now and then."""
    model: Any = built_model(tokenizer, hidden_dim=32, layers=1)
    with torch.no_grad():
        # Fresh weights find all tokens about equally likely: among hundreds the end would hardly ever be drawn.
        model.lm_head.weight[tokenizer.eos_token_id] *= 60
    model.save_pretrained(str(folder))


def write_with_tokenizer_of(source: str, folder: Path) -> None:
    """Write the tokenizer of another model, and a small model for it, as `write_byte_level` does."""
    tokenizer: Any = load_tokenizer(source)
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    write_model(folder / "model", tokenizer)
