"""Write the pages of this folder that are made from the code: `make docs`.

docs/commands.md holds the help of every command, docs/diagnostics/ every diagnostic code, docs/reference/ every key of
a file, docs/dev/faults.md the faults of `make chaos`, docs/placement.svg the picture of the 18-node example,
docs/support.md the tables of what was run, docs/media/curves.svg the curves of docs/results.yaml. A test compares them
with what this would write, so they cannot fall behind.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from typer.main import get_command

from docs.results import curves, support_page
from recipes.agent.tool_config import TOOL_OPTIONS
from recipes.embodied.config.env_types import ENV_TYPES
from recipes.embodied.config.model_config import MODEL_OPTIONS
from recipes.language.config.algorithm_config import ADVANTAGE_OPTIONS, LOSS_OPTIONS
from recipes.language.config.problem_config import PROBLEM_OPTIONS, REWARD_OPTIONS
from recipes.language.config.rollout_config import ENGINE_OPTIONS
from rlinf_cli.codes import Code, Example, codes_by_stage
from rlinf_cli.job.field_docs import FieldDoc, describe
from rlinf_cli.main import app
from rlinf_cli.main import main as run_rlinf
from rlinf_core.job.load import ClusterFile
from rlinf_core.job.recipe import Recipe
from tests.chaos.fault_table import FAULTS, STANDSTILLS

DOCS = Path(__file__).parent
_HELP_WIDTH = 88
_PICTURE: Final = (1360, 960)
# Guides come before these in the site's search.
_LAST_IN_SEARCH: Final = "---\nsearch: {{boost: 0.2}}\n---\n"
_MADE: Final = _LAST_IN_SEARCH + "<!-- Made by `make docs` from {source}. Edit that instead. -->\n"


def pages() -> dict[Path, str]:
    """Return each page that is made, with its text."""
    return {
        DOCS / "commands.md": _commands(),
        **_diagnostics(),
        **_reference(),
        DOCS / "dev/faults.md": _faults(),
        DOCS / "placement.svg": _picture(),
        DOCS / "support.md": support_page(),
        DOCS / "media/curves.svg": curves(),
    }


def _recipes() -> dict[str, Recipe]:
    """Return the recipes that come with rlinf, whatever others this Python has."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    offered: dict[str, str] = project["entry-points"]["rlinf.recipes"]
    named = {name: target.partition(":") for name, target in offered.items()}
    return {name: cast("Recipe", getattr(import_module(module), which)) for name, (module, _, which) in named.items()}


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
        _MADE.removeprefix(_LAST_IN_SEARCH).format(source="`tests/chaos/fault_table.py`"),
        "# Faults\n",
        "What becomes of a run where a process is killed or stopped, a checkpoint is damaged, or files have no room."
        " Each cell has its name for [`make chaos`](deaths.md#planting-faults), which plants it; the nightly"
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


def _diagnostics() -> dict[Path, str]:
    stages = codes_by_stage()
    overview = [
        _MADE.format(source="`rlinf_cli/codes/`"),
        "# Diagnostics\n",
        "Every finding of `rlinf validate`, by the code that it prints in brackets; `rlinf explain CODE` prints it.",
    ]
    made: dict[Path, str] = {}
    for stage, codes in stages.items():
        overview.append(f"\n## {stage.capitalize()}\n")
        overview += [f"* [`{code.name}`](diagnostics/{stage}.md#{code.name}): {code.title}" for code in codes]
        parts = [
            _MADE.format(source=f"`rlinf_cli/codes/{stage}/`"),
            f"# Diagnostics: {stage}\n",
            "In a wrong example the reported place stands between `«` and `»`.\n",
            *(_code(code) for code in codes),
        ]
        made[DOCS / f"diagnostics/{stage}.md"] = "\n".join(parts)
    return {DOCS / "diagnostics.md": "\n".join(overview) + "\n", **made}


def _code(code: Code) -> str:
    return "\n".join(
        (
            f"## {code.name}\n",
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


def _reference() -> dict[Path, str]:
    recipes = sorted(_recipes().items())
    overview = [
        _MADE.format(source="the models"),
        "# Every key of a file\n",
        "`rlinf explain PATH` prints a key's type, default and meaning; `--recipe NAME` those of one recipe.\n",
        "* [`cluster`](reference/cluster.md): machines and placement, of all recipes",
        *(f"* [`recipe: {name}`](reference/{name}.md): {recipe.summary}" for name, recipe in recipes),
        "* [Options](reference/options.md) of policies, simulators, advantages, losses, engines and rewards, by type",
    ]
    made = {name: _keys(f"Keys of recipe {name}", recipe.config_model()) for name, recipe in recipes}
    made["cluster"] = _keys("Keys of cluster", ClusterFile, only="cluster")
    made["options"] = _options()
    pages = {DOCS / f"reference/{name}.md": text for name, text in made.items()}
    return {DOCS / "reference.md": "\n".join(overview) + "\n", **pages}


def _keys(title: str, model: type, only: str = "") -> str:
    """Return a page with a table for each section of a model; `cluster` has a page of its own."""
    parts = [
        _MADE.format(source="the models"),
        f"# {title}\n",
        "`[]` stands for each item of a list, `NAME` for a key of your own.\n",
    ]
    for section in describe(model).children:
        if section.path == "recipe" or (section.path == "cluster") != bool(only):
            continue
        parts += [f"## {section.path}\n", f"{section.description}\n", _HEAD]
        parts += [_row(doc) for doc in _below(model, section.path)] or [_row(section)]
        parts.append("")
    return "\n".join(parts)


_HEAD: Final = "| key | type | default | meaning |\n|---|---|---|---|"


def _below(model: type, path: str) -> Iterator[FieldDoc]:
    for doc in describe(model, path).children:
        yield doc
        yield from _below(model, doc.path)


def _row(doc: FieldDoc) -> str:
    default = "required" if doc.required else (f"`{doc.default}`" if doc.default is not None else "")
    cells = (f"`{doc.path}`", doc.type, default, doc.description)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _options() -> str:
    """Return a page of the options that depend on the value of another key."""
    parts = [_MADE.format(source="the models"), "# Options by type\n"]
    environments = {name: kind.options for name, kind in ENV_TYPES.items() if kind.options}
    groups: Sequence[tuple[str, str, Mapping[str, object]]] = (
        ("actor.model.options", "model_type", MODEL_OPTIONS),
        ("env.train.options", "env_type", environments),
        ("algorithm.options", "adv_type", ADVANTAGE_OPTIONS),
        ("algorithm.options", "loss_type", LOSS_OPTIONS),
        ("rollout.engine_options", "backend", ENGINE_OPTIONS),
        ("data.options", "type", PROBLEM_OPTIONS),
        ("reward.options", "reward_type", REWARD_OPTIONS),
        ("agent.tool_options", "tools", TOOL_OPTIONS),
    )
    for path, key, models in groups:
        parts.append(f"## {path} by {key}\n")
        for model in dict.fromkeys(models.values()):
            names = ", ".join(name for name, other in models.items() if other is model)
            rows = [_row(doc) for doc in describe(model).children]
            parts += [f"### {key}: {names}\n", _HEAD, *rows, ""] if rows else []
    return "\n".join(parts)


def main() -> int:
    """Write the pages; with `--check`, tells whether they are up to date instead."""
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(DOCS.parent)} is not what `make docs` writes", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(pages()[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
