"""docs/migrate.md, of TRL: its files are sound and learn, its function scores, and every key of its tables exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest

from recipes.language.models.load_model import built_model, built_tokenizer
from recipes.language.rewards.scoring import Item, Scorer
from recipes.sft_chat.chat_actor import ChatActor
from recipes.sft_chat.config import ChatActorConfig, ChatConfig
from rlinf_cli.job.field_docs import describe
from rlinf_cli.job.load import load_with_lint
from rlinf_core.errors import RLinfError
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.job.recipe import Job
from tests.unit.recipes.language.in_threads import Hub, in_thread
from tests.unit.recipes.sft_chat.chats import jsonl, turns

PAGE = (Path(__file__).parents[3] / "docs/migrate.md").read_text(encoding="utf-8")
PAGE = PAGE.partition("\n## TRL\n")[2].partition("\n## ")[0]
FILES: dict[str, str] = dict(re.findall(r"^```\w+ file=(\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
KEY = re.compile(r"`((?:cluster|runner|actor|rollout|algorithm|data|reward)(?:\.\w+)+)")
KEYS = sorted({key for line in PAGE.splitlines() if line.startswith("| ") for key in KEY.findall(line)})


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, a small model, and rows to learn from."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tokenizer = built_tokenizer(words=ChatActorConfig.built_words, template=ChatActorConfig.built_template)
    built_model(tokenizer, hidden_dim=32, layers=1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(str(tmp_path / "model"))
    jsonl(tmp_path / "chat.jsonl", [{"messages": turns(f"{n}+1=", str(n + 1))} for n in range(9)])
    jsonl(tmp_path / "chat_test.jsonl", [{"prompt": "1+1=", "completion": "2"}])
    jsonl(tmp_path / "problems.jsonl", [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def sound(name: str) -> Job:
    job = load_with_lint(name)
    assert [finding.message for finding in job.diagnostics if finding.severity != "note"] == []
    return job


def test_file_of_sft_is_sound_and_learns(page: Path) -> None:
    job = sound("sft.yaml")
    assert job.recipe is not None
    assert job.recipe.name == "sft_chat"
    config = cast("ChatConfig", job.config)
    actor = in_thread(ChatActor, config.actor.group_name, Hub(), 0, 1)(config)
    assert actor.init_worker() == (9, 1)
    before = actor.evaluate()["eval/loss"]
    actor.learn(1, None)
    assert actor.evaluate()["eval/loss"] != before


def test_file_of_grpo_is_sound_and_its_function_scores(page: Path) -> None:
    assert sound("grpo.yaml").config is not None
    with Scorer("rewards:ends_with_answer") as scorer:
        scores = scorer.score_all([Item(prompt="1+1=", text=text, answer="2") for text in ("it is 2", "3")])
        assert scorer.convention == "trl"
    assert [score.reward for score in scores] == [1.0, 0.0]


@pytest.mark.parametrize("key", KEYS)
def test_key_of_a_table_exists(key: str) -> None:
    assert any(has_key(recipe, key) for recipe in ("math", "sft_chat")), f"no recipe has `{key}`"


def has_key(recipe: str, path: str) -> bool:
    try:
        describe(find_recipe(recipe).config_model(), path)
    except (RLinfError, LookupError):
        return False
    return True


def test_tables_name_keys() -> None:
    assert len(KEYS) > 30
    assert not has_key("math", "actor.optim.learning_speed")
