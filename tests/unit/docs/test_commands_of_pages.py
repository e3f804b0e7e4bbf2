"""Commands of pages are real ones, and what the pages on migration say is so."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import typer.main

from recipes.language.models.load_model import built_model, built_tokenizer
from recipes.language.rewards.scoring import Item, Scorer
from recipes.sft_chat.chat_actor import ChatActor
from recipes.sft_chat.config import ChatActorConfig, ChatConfig
from rlinf_cli.job.field_docs import describe
from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.lazy import command_now, options_of, renewed
from rlinf_cli.main import app
from rlinf_core.errors import RLinfError
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.job.recipe import Job
from tests.unit.recipes.language.in_threads import Hub, in_thread
from tests.unit.recipes.sft_chat.chats import jsonl, turns

REPOSITORY = Path(__file__).parents[3]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
# Usage lines made from the code, and what benchmarks print.
MADE = {"commands.md", "faults.md", "benchmarks.md"}
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(rlinf [^`\n]+)`")
LINE = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?(rlinf [a-z].*)$")
# Placeholders in the place of more options, or of a part of a command: nothing to parse.
ELLIPSIS = re.compile(r"\.\.\.|…|\[")


def commands_of(text: str) -> Iterator[str]:
    """Yield the commands that a page shows, from code blocks and within lines."""
    for block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            result = LINE.match(line)
            if result is not None:
                yield re.split(r"\s+(?:#|\||&&|>|;)", result[1])[0].strip()
    yield from INLINE.findall(FENCE.sub("", text))


def unread(command: str) -> list[str]:
    """Return the words of a command that nothing takes, parsed as the command line does but not carried out.

    Raises:
        LookupError: there is no command of the name, or a command with arguments lacks an option that it requires.
        Exception: click's own, for an option that there is not, or one without its value.
    """
    level: Any = typer.main.get_command(app)
    words = shlex.split(command)[1:]
    context: Any = level.context_class(level, info_name="rlinf")
    assert command_now(words) is None, "an earlier name"
    while hasattr(level, "get_command"):
        default = getattr(level, "default", None)
        if default is not None and (not words or words[0].startswith("-")):
            words = [default, *words]
        elif not words or words[0].startswith("-"):
            break
        else:
            assert renewed(words, set(options_of(level.get_command(context, words[0]))))[1] == []
        name, level, words = level.resolve_command(context, words)
        context = level.context_class(level, info_name=name, parent=context)
    # Not by `main`: callbacks of options would show help or ask for files.
    values, left, _ = level.make_parser(context).parse_args(args=list(words))
    if lacking := [option.name for option in level.params if option.required and option.name not in values if words]:
        raise LookupError(f"no option {lacking[0]}")
    return left


SHOWN = sorted(
    {
        (page.name, command)
        for page in PAGES
        if page.name not in MADE and page.parent.name not in ("reference", "diagnostics")
        for command in commands_of(page.read_text(encoding="utf-8"))
        if not ELLIPSIS.search(command)
    }
)


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_a_command_of_a_page_exists(page: str, command: str) -> None:
    assert unread(command) == []


def test_there_are_commands() -> None:
    assert len(SHOWN) > 100


@pytest.mark.parametrize(
    "command",
    [
        "rlinf trian",
        "rlinf train --resume-from-here",
        "rlinf inspect memori laptop",
        "rlinf inspect env embodied/pick-laptop -r 0",
    ],
)
def test_a_command_that_is_none_is_seen(command: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no (such )?(command|option)"):
        unread(command)


def help_of_commands(command: Any, path: str, parent: Any = None) -> Iterator[tuple[str, str]]:
    """Yield each command that can be called, with the examples of its help."""
    context = command.make_context(path, [], parent=parent, resilient_parsing=True)
    yield path, command.epilog or ""
    for name in getattr(command, "list_commands", lambda _: [])(context):
        yield from help_of_commands(command.get_command(context, name), f"{path} {name}", context)


# `rlinf inspect` and its like do nothing alone: their help lists commands.
FAMILIES = {"rlinf inspect", "rlinf runs", "rlinf robot", "rlinf tasks", "rlinf venv"}
HELP = [entry for entry in help_of_commands(typer.main.get_command(app), "rlinf") if entry[0] not in FAMILIES]


@pytest.mark.parametrize(("path", "epilog"), HELP, ids=[path for path, _ in HELP])
def test_help_shows_examples_that_parse(path: str, epilog: str) -> None:
    shown = [line.strip() for line in epilog.splitlines() if line.startswith("  ")]
    assert shown
    for example in shown:
        assert example.startswith(path)
        assert len(example) <= 76, "a terminal of 80 columns breaks the line"
        assert unread(example.partition(" > ")[0]) == []


def test_words_too_many_are_seen() -> None:
    assert unread("rlinf down cluster.yaml other.yaml") == ["other.yaml"]


MIGRATE = (Path(__file__).parents[3] / "docs/migrate.md").read_text(encoding="utf-8")
# The page's sections, each with the recipe whose keys its table names.
SECTIONS_OF_PAGE = {"RLlib": "embodied", "LeRobot": "sft"}
SECTIONS = ("cluster", "runner", "env", "actor", "rollout", "algorithm", "data")
KEY = re.compile(rf"`((?:{'|'.join(SECTIONS)})(?:\.\w+)+)")


def keys() -> list[tuple[str, str]]:
    """Return the section's recipe, and each key that a row of its table names in its second column."""
    rows = [
        (recipe, line.split("|")[2])
        for title, recipe in SECTIONS_OF_PAGE.items()
        for line in MIGRATE.partition(f"\n## {title}\n")[2].partition("\n## ")[0].splitlines()
        if line.startswith("| ")
    ]
    return [(recipe, key) for recipe, cell in rows for key in KEY.findall(cell)]


@pytest.mark.parametrize(("recipe", "key"), keys())
def test_a_key_of_a_table_exists(recipe: str, key: str) -> None:
    # What a component is called is the user's.
    path = re.sub(r"^cluster\.component_placement\.\w+$", "cluster.component_placement", key)
    assert any(has_key(name, path) for name in (recipe, "embodied")), f"no recipe has `{path}`"


def has_key(recipe: str, path: str) -> bool:
    try:
        describe(find_recipe(recipe).config_model(), path)
    except (RLinfError, LookupError):
        return False
    return True


def test_a_key_that_no_recipe_has_is_seen() -> None:
    assert not has_key("embodied", "actor.optim.learning_speed")


def test_there_are_keys() -> None:
    assert len(keys()) > 30


def test_the_file_of_the_page_is_sound() -> None:
    (text,) = re.findall(r"^```yaml file=cartpole\.yaml\n(.*?)^```", MIGRATE, re.MULTILINE | re.DOTALL)
    job = load_with_lint("-", stdin=text.encode())
    assert job.ok
    assert [diagnostic.code for diagnostic in job.diagnostics if diagnostic.severity != "note"] == []


TRL_PAGE = (Path(__file__).parents[3] / "docs/migrate.md").read_text(encoding="utf-8")
TRL_PAGE = TRL_PAGE.partition("\n## TRL\n")[2].partition("\n## ")[0]
FILES: dict[str, str] = dict(re.findall(r"^```\w+ file=(\S+)\n(.*?)^```", TRL_PAGE, re.MULTILINE | re.DOTALL))
KEY_OF_TRL = re.compile(r"`((?:cluster|runner|actor|rollout|algorithm|data|reward)(?:\.\w+)+)")
KEYS = sorted({key for line in TRL_PAGE.splitlines() if line.startswith("| ") for key in KEY_OF_TRL.findall(line)})


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


def test_tables_name_keys() -> None:
    assert len(KEYS) > 30
    assert not has_key("math", "actor.optim.learning_speed")
