"""Right answers that a model is shown before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from recipes.language.config.language_config import LanguageConfig
from recipes.language.learning.warm_start import right_answers
from recipes.language.models.load_model import built_tokenizer
from rlinf_core import ConfigError, load_job

LONG = "1+" * 30 + "1="


def answers_of(folder: Path, *prompts: str) -> list[Any]:
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    changes = ["data.type=jsonl", f"data.train_data_paths={file}", f"data.val_data_paths={file}"]
    job = load_job("math_laptop", [*changes, "actor.warm_start.steps=1"], environ={})
    job.raise_if_bad()
    return right_answers(cast("LanguageConfig", job.config), built_tokenizer())


def test_prompts_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    results = answers_of(tmp_path, "1+1=", LONG, "0+2=")
    assert len(results) == 32
    assert len({result.prompt for result in results}) == 2
    assert all(result.prompt for result in results)


def test_without_any_that_fits_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"empty or longer than `data.max_prompt_length` \(24 tokens\)"):
        answers_of(tmp_path, LONG)
