"""A folder in which programs of the Tinker cookbook run offline: a model and data sets named like those of the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.unit.recipes.agent.conversation.byte_level import write_byte_level

# The cookbook reads its tokenizer from a relative folder of this name, and knows it as one that needs no chat template.
MODEL: Final = "Qwen/Qwen3-8B-Base"


def write_folder(folder: Path) -> None:
    """Write a small model with a tokenizer of bytes, and some rows of each data set."""
    write_byte_level(folder / "parts")
    model = folder / MODEL
    shutil.copytree(folder / "parts/model", model)
    shutil.copytree(folder / "parts/tokenizer", model, dirs_exist_ok=True)
    chats = [[("user", f"What is {n} + 1?"), ("assistant", f"It is {n + 1}.")] for n in range(64)]
    messages = [[{"role": role, "content": text} for role, text in chat] for chat in chats]
    _write(folder / "HuggingFaceH4/no_robots/train.jsonl", ({"messages": chat} for chat in messages))
    _write(folder / "lessons.jsonl", ({"messages": chat} for chat in messages))
    problems = [{"question": f"Add {n} and {n}.", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(32)]
    _write(folder / "openai/gsm8k/main/train.jsonl", problems)
    (folder / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"
    )
    pairs = [{part: f"\n\nHuman: Say {n}.\n\nAssistant:{_answer(part, n)}" for part in _PARTS} for n in range(64)]
    for split in ("train", "test"):
        _write(folder / f"Anthropic/hh-rlhf/{split}.jsonl", pairs)
        _write(folder / f"zwhe99/DeepMath-103K/{split}.jsonl", problems)


_PARTS: Final = ("chosen", "rejected")


def _answer(part: str, number: int) -> str:
    return f" {number}, with pleasure." if part == "chosen" else " no no no!"


def _write(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
