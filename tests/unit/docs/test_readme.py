"""README: short, and what it shows is what rlinf prints."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.media import PICTURE
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.main import main
from rlinf_core.job.find_recipe import find_recipe, recipe_names

REPOSITORY = Path(__file__).parents[3]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
RUN, TYPO = re.findall(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_readme_is_short() -> None:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    words = re.findall(r"[^\W_]+", re.sub(r"\]\([^)]*\)", "]", prose))
    assert len(words) <= 300


def test_readme_shows_the_run_of_its_picture() -> None:
    svg = "{http://www.w3.org/2000/svg}"
    frames = ElementTree.parse(PICTURE).findall(f".//{svg}g[@id='run']/{svg}g")
    rows: dict[str, str] = {}
    for text in frames[-1].iter(f"{svg}text"):
        row = text.attrib["y"]
        rows[row] = f"{rows.get(row, '')} {text.text}".strip()
    shown = {" ".join(row.split()) for row in rows.values()}
    lines = [" ".join(line.split()) for line in RUN.splitlines()]
    assert 4 <= len(lines) <= 7
    assert [line for line in lines if line not in shown] == []


def test_readme_shows_a_typo_as_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = (REPOSITORY / "configs/laptop.yaml").read_text(encoding="utf-8")
    Path("laptop.yaml").write_text(shipped.replace("task: pick", "task: pik"), encoding="utf-8")
    assert main(["validate", "laptop.yaml"]) == ExitCode.INVALID
    assert capsys.readouterr().out.startswith(TYPO)


def test_readme_has_a_command_for_every_recipe() -> None:
    commands = re.findall(r"`rlinf (?:train recipe=|(?=serve ))(\w+)", README)
    # A variant is what a recipe becomes by its data.
    variants = {variant for name in recipe_names() for variant in find_recipe(name).variants.values()}
    assert sorted(set(commands)) == sorted(set(recipe_names()) - variants)
