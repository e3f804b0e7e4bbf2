"""Writes the pages of this folder that are made from the code: `make docs`.

docs/commands.md holds the help of every command, docs/diagnostics.md every diagnostic code, docs/reference.md every key
of a file, docs/faults.md the faults of `make chaos`, docs/placement.svg the picture of the 18-node example. A test
compares them with what this would write, so they cannot fall behind.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from typer.main import get_command

from rlinf_cli.codes import Code, Example, codes_by_stage
from rlinf_cli.file.field_docs import FieldDoc, describe
from rlinf_cli.main import app
from rlinf_cli.main import main as run_rlinf
from rlinf_core.job.load import ClusterFile
from rlinf_core.job.recipe import Recipe
from rlinf_core.registry import import_target
from tests.chaos.fault_table import FAULTS, STANDSTILLS

DOCS = Path(__file__).parent
_HELP_WIDTH = 88
_PICTURE: Final = (1360, 960)
_MADE = "<!-- Made by `make docs` from {source}. Edit that instead. -->\n"


def pages() -> dict[Path, str]:
    """Return each page that is made, with its text."""
    return {
        DOCS / "commands.md": _commands(),
        DOCS / "diagnostics.md": _diagnostics(),
        DOCS / "reference.md": _reference(),
        DOCS / "faults.md": _faults(),
        DOCS / "placement.svg": _picture(),
    }


def _recipes() -> dict[str, Recipe]:
    """Return the recipes that come with rlinf, whatever others this Python has."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    offered: dict[str, str] = project["entry-points"]["rlinf.recipes"]
    return {name: cast("Recipe", import_target(target, "recipe")) for name, target in offered.items()}


def _picture() -> str:
    """Return the page of the placement as a picture that Markdown can show."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_rlinf(["inspect", "hetero18", "-o", "-"])
    page = printed.getvalue()
    style, body = (page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0] for tag in ("style", "body"))
    size = f'width="{_PICTURE[0]}" height="{_PICTURE[1]}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_PICTURE[0]} {_PICTURE[1]}" role="img">\n'
        f"<style>{style}</style>\n<foreignObject {size}>\n"
        f'<div xmlns="http://www.w3.org/1999/xhtml">{body}</div>\n</foreignObject>\n</svg>\n'
    )


def _commands() -> str:
    parts = [
        _MADE.format(source="`rlinf_cli/commands/`"),
        "# Every command\n",
        "`rlinf COMMAND --help` prints the same.\n",
    ]

    def add(command: Any, name: str, parent: Any) -> None:
        context = command.make_context(name, [], parent=parent, resilient_parsing=True)
        context.terminal_width = context.max_content_width = _HELP_WIDTH
        parts.append(f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n")
        for name in getattr(command, "list_commands", lambda _: [])(context):
            add(command.get_command(context, name), name, context)

    add(get_command(app), "rlinf", None)
    return "\n".join(parts)


# Each figure, and what was seen.
_FAULT_FIGURES: Final = (
    (
        "runs of these jobs with up to six faults each",
        "46 faults in 15 runs. embodied: 5 equal, 2 that say why, 1 that ended although restarts were left; math: 2"
        " equal; sft_chat: 3 equal; agent: 1 equal, 1 in which a stopped worker was not named. What the two showed is"
        " mended since",
    ),
    (
        "the same with up to ten faults each, at a load of 20 to 100",
        "41 faults in 11 runs. embodied: 3 equal, 1 judged hung while it launched; SAC on an arm: 1 equal, 1 with equal"
        " weights but other settings of the critics' optimizer, 1 without Ray; rollouts ahead: 1 that a restart without"
        " Ray ended; math: 1 that says why; sft_chat: 1 equal, 1 without Ray when it was to go on; agent, math"
        " asynchronous: none. Of the five that are not right one kind is repeated since the mends, that of the arm",
    ),
    (
        "the same with up to eight faults each, at a load of 2 to 6",
        "129 faults in 36 runs. Synchronous jobs: 12 equal, 10 that say why; asynchronous ones: 5 right, 4 that say"
        " why. Five did not say why, all by seed 4002 that leaves no room for files where a checkpoint is due: mended,"
        " and that seed says why in all seven jobs since",
    ),
    (
        "the same on later code, at a load of 4 to 14",
        "147 faults in 47 runs. Synchronous jobs: 19 equal, 8 that say why, 1 that no fault hit; asynchronous ones: 6"
        " right, 4 that say why. Six of SAC on an arm were judged wrong, as memory of their processes was compared; one"
        " of it and two of math asynchronous ended with restarts left, of the last two bugs below. All nine seeds end"
        " as they should since",
    ),
    (
        "bugs that these showed, mended since",
        "the end of a run, not recorded where the disk had no room for two seconds; settings of an optimizer's group"
        " without weights, lost when a run of SAC goes on; a restart whose Ray does not start within Ray's 30 s, which"
        " ended the run; in `make chaos`, a slow launch judged as hung, a command whose Ray does not start at first"
        " judged as wrong, and memory compared; a worker that fails between two looks of an"
        " asynchronous run, taken for one that returned; the death of `gcs_server` in the midst of a checkpoint, taken"
        " for a consequence of the worker that wrote it",
    ),
    (
        "from `kill -9` of `gcs_server` until a driver says so, by a warning with its name / has ended its Ray",
        "0.2 s / 2.6 to 2.9 s in ten of ten, at a load of 3 (7.1 while Ray's shutdown waited 5 s to report its tasks);"
        " of the raylet 0.2 / 1.2 s, four of four",
    ),
    (
        "simulation, 10,000 seeds of each scenario",
        "all right; seconds of CPU for a thousand: channel 1.1, manager 1.6, plan of prompts 0.6, tasks of agents 0.4;"
        " 31 of 31 planted races detected within 400 seeds",
    ),
    (
        "operations kept for `recent.txt`",
        "59 in a step of the job embodied, 22 in one of math, in all processes together, at 0.2 µs each: below 0.1 % of"
        " their CPU time",
    ),
    (
        "the same, by chance in one of each two steps of a run (`python -m benchmarks recorder`, 500 pairs, quiet)",
        "of the workers' CPU time: embodied +0.11 ± 0.27 %, math +0.28 ± 0.35 %",
    ),
    (
        "supervision: the manager, and the workers' threads that answer it",
        "of the workers' CPU time: embodied 0.69 %, math 0.67 %, in 1,000 steps each",
    ),
    (
        "from `kill -9` of a worker until work goes on, by it alone / by one start of it / by a restart of all"
        " (`python -m benchmarks recovery`, quiet)",
        "env 0.8 s / 1.22 / 4.9 s, rollout 1.6 s / 0.99 / 4.9 s; math: reward 1.5 s / 1.07 / 6.9 s, rollout 3.4 s /"
        " 1.02 / 6.9 s; agent 1.0 s / 1.01 / 18.1 s, its reward 1.7 s / 1.05 / 18.1 s; no finished step is done again",
    ),
)


def _faults() -> str:
    columns = list(dict.fromkeys(fault.deed for fault in FAULTS.values()))
    rows = list(dict.fromkeys(fault.target for fault in FAULTS.values()))
    cells = {(fault.target, fault.deed): f"`{name}`: {fault.outcome}" for name, fault in FAULTS.items()}
    parts = [
        _MADE.format(source="`tests/chaos/fault_table.py`"),
        "# Faults\n",
        "What becomes of a run where a process is killed or stopped, a checkpoint is damaged, or files have no room."
        " Each cell has its name for [`make chaos`](bad-day.md#planting-faults), which plants it; the nightly"
        " test `tests/integration/cli/test_chaos.py` does, by seeds, in small jobs of the recipes embodied (PPO, also"
        " with rollouts ahead, and SAC on an arm in MuJoCo), math (also asynchronous), agent and sft_chat.\n",
        f"| process | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        *(f"| {target} | {' | '.join(cells.get((target, deed), '') for deed in columns)} |" for target in rows),
    ]
    parts += [
        "\n## Standstills and links\n",
        "Faults that end no process. A worker that holds up the run is named by the driver and by `rlinf why`. Seconds"
        " are those from the last finished step until `rlinf why`, asked again and again, names it, on a quiet machine"
        " where no load is named.\n",
        "| what happens | what is reported | seconds | what is lost | shown by |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(row[:-1])} | `tests/{row.test}` |" for row in STANDSTILLS),
        "\n## As measured\n",
        "On two cores beside other work, at a load of 13 to 30 where no other is named. A quiet machine is faster.\n",
        "| what | figure |",
        "|---|---|",
        *(f"| {what} | {figure} |" for what, figure in _FAULT_FIGURES),
    ]
    return "\n".join(parts) + "\n"


def _diagnostics() -> str:
    parts = [
        _MADE.format(source="`rlinf_cli/codes/`"),
        "# Diagnostics\n",
        "Every rule that `rlinf validate` checks, by the code it prints in brackets. `rlinf explain CODE` prints the"
        " same.",
        "In a wrong example the place that is reported stands between `«` and `»`.\n",
    ]
    for stage, codes in codes_by_stage().items():
        parts.append(f"## {stage.capitalize()}\n")
        parts.extend(_code(code) for code in codes)
    return "\n".join(parts)


def _code(code: Code) -> str:
    return "\n".join(
        (
            f"### {code.name}\n",
            f"*{code.severity}*: {code.title}\n",
            f"{code.meaning.strip()}\n",
            f"Wrong:\n\n{_example(code.wrong)}\n",
            f"Right:\n\n{_example(code.right)}\n",
        )
    )


def _example(example: Example) -> str:
    blocks = [f"```yaml\n{example.text.rstrip()}\n```"]
    blocks += [f"with `{name}`:\n\n```yaml\n{text.rstrip()}\n```" for name, text in example.files]
    blocks += [f"and on the command line: `{argument}`" for argument in example.overrides]
    blocks += [f"with `--assume {argument}`" for argument in example.assume]
    if example.found is not None:
        blocks.append(f"with `--live`, where each node has {example.found} accelerators")
    return "\n\n".join(blocks)


def _reference() -> str:
    models = {name: recipe.config_model() for name, recipe in sorted(_recipes().items())}
    sections = _children({name: describe(model) for name, model in models.items()}, models)
    parts = [
        _MADE.format(source="the models"),
        "# Every key of a file\n",
        "`[]` stands for each item of a list, `NAME` for a key of your own. `rlinf explain PATH` prints the same, and"
        " `--recipe NAME` for one recipe alone.\n",
        "A key of every recipe has no name beside it. What differs is followed by the recipes that it holds in.\n",
        "The recipes:\n",
        *(f"* `{name}`: {recipe.summary}" for name, recipe in sorted(_recipes().items())),
        "",
        "## cluster\n",
        *_section({"": describe(ClusterFile, "cluster")}, {"": ClusterFile}),
    ]
    for path, docs in sections.items():
        if path not in ("cluster", "recipe"):
            names = "" if len(docs) == len(models) else f" ({', '.join(docs)})"
            parts += [f"## {path}{names}\n", *_section(docs, {name: models[name] for name in docs})]
    return "\n".join(parts)


# What recipes say of one key, by recipe; and the models of their files.
_Docs: TypeAlias = Mapping[str, FieldDoc]
_Models: TypeAlias = Mapping[str, type]


def _section(docs: _Docs, models: _Models) -> list[str]:
    """Return the text and the table of a section: a row for each key, whatever number of recipes has it."""
    rows: list[tuple[str, ...]] = [("key", "recipes", "type", "default", "meaning"), ("---",) * 5]

    def add(path: str, docs: _Docs) -> None:
        cells = (
            f"`{path}`",
            "" if len(docs) == len(models) else ", ".join(docs),
            _by_recipe({name: doc.type for name, doc in docs.items()}),
            _by_recipe({name: _default(doc) for name, doc in docs.items()}),
            _by_recipe({name: doc.description for name, doc in docs.items()}),
        )
        rows.append(tuple(cell.replace("|", "\\|").replace("\n", " ") for cell in cells))
        for below, inner in _children(docs, models).items():
            add(below, inner)

    for path, inner in _children(docs, models).items():
        add(path, inner)
    if not any(row[1] for row in rows[2:]):
        rows = [(row[0], *row[2:]) for row in rows]
    lines = ("| " + " | ".join(row) + " |" for row in rows)
    return [_by_recipe({name: doc.description for name, doc in docs.items()}) + "\n", *lines, ""]


def _children(docs: _Docs, models: _Models) -> dict[str, dict[str, FieldDoc]]:
    """Return the keys within a section by path, each as its recipes have it."""
    children: dict[str, dict[str, FieldDoc]] = {}
    for name, doc in docs.items():
        for child in describe(models[name], doc.path).children:
            children.setdefault(child.path, {})[name] = child
    return children


def _default(doc: FieldDoc) -> str:
    return "required" if doc.required else (f"`{doc.default}`" if doc.default is not None else "")


def _by_recipe(texts: Mapping[str, str]) -> str:
    """Return a text that all recipes agree in, or each with its recipes behind it."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    if len(names) == 1:
        return next(iter(names))
    return "<br>".join(f"{text or 'none'} ({', '.join(recipes)})" for text, recipes in names.items())


def main() -> int:
    """Write the pages; with `--check`, tells whether they are up to date instead."""
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"docs/{path.name} is not what `make docs` writes", file=sys.stderr)
        else:
            path.write_text(pages()[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
