"""Files of other projects: composed, with their references, and hostile ones."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

from rlinf_cli.importing.convert import Converted, convert
from rlinf_cli.importing.references import References, UnresolvableError
from rlinf_cli.importing.shared_rules import Fate
from rlinf_cli.importing.sources import HydraFile, job_files, read_job
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.config.composing.compose import compose
from rlinf_core.config.diagnostics import Diagnostics, Severity, render_text
from rlinf_core.config.reading import read
from rlinf_core.config.tree import MappingNode, Node, ScalarNode, SequenceNode, SourceText, find, format_path
from tests.unit.cli.typed import text_file

DATA = Path(__file__).parents[3] / "data" / "import"
JOBS = [file for kind in ("embodied", "reasoning", "verl") for file in job_files(DATA / kind)[0]]
# What would train something else stays wrong until somebody decides.
UNDECIDED = {
    "behavior_unsupported": {"env.train.env_type", "env.eval.env_type"},
    "turns_multi_node": {"algorithm.adv_type"},
}
ENVIRON = {"SHARED_CONFIGS": str(DATA / "shared")}


@cache
def composed(file: Path) -> HydraFile:
    job, findings = read_job(str(file), [], [], ENVIRON)
    assert job is not None, [render_text(diagnostic) for diagnostic in findings]
    return job


@cache
def converted(file: Path) -> Converted:
    return convert(composed(file), ENVIRON)


def leaves(node: Node, path: tuple[str | int, ...] = ()) -> Iterator[str]:
    """Yield the paths of single values, and of lists of such."""
    if isinstance(node, MappingNode) and node.entries:
        for entry in node.entries:
            yield from leaves(entry.value, (*path, entry.key.raw))
    elif isinstance(node, SequenceNode) and not all(isinstance(item, ScalarNode) for item in node.items):
        for index, item in enumerate(node.items):
            yield from leaves(item, (*path, index))
    else:
        yield format_path(path)


by_name = pytest.mark.parametrize("file", JOBS, ids=[f"{file.parent.name}/{file.stem}" for file in JOBS])


@by_name
def test_the_result_validates(file: Path) -> None:
    result = converted(file)
    # `validate` reads it anew: what the summary says must be what it says.
    job = load_with_lint("-", stdin=result.text.encode(), environ=ENVIRON)
    errors = [diagnostic for diagnostic in job.diagnostics if diagnostic.severity is Severity.ERROR]
    messages = {format_path(item.path) for item in (*result.errors, *result.lacking)}
    assert {format_path(error.path) for error in errors} == messages
    wrong = {format_path(error.path) for error in result.errors}
    assert wrong == UNDECIDED.get(file.stem, set()), [render_text(error) for error in result.errors]


@by_name
def test_every_key_is_accounted_for(file: Path) -> None:
    result = converted(file)
    sources = [outcome.source for outcome in result.outcomes]
    assert len(sources) == len(set(sources))
    keys = set(leaves(composed(file).tree))
    # A reference to a whole section stands for the keys of that section.
    assert {
        key for key in keys if not any(message == key or message.startswith(f"{key}.") for message in sources)
    } == set()
    job = load_with_lint("-", stdin=result.text.encode(), environ=ENVIRON)
    assert job.tree is not None
    # As it is in the text: what another `loss_type` has is not read where it is the default.
    text = compose(SourceText("-", result.text), (), Diagnostics(), environ=ENVIRON)
    assert text is not None
    written = set(leaves(text.tree))
    for entry in result.outcomes:
        if entry.fate in (Fate.CARRIED, Fate.RENAMED):
            assert set(entry.targets) <= written, entry
        else:
            assert entry.reason, entry
            # As a comment of the new file, with its value.
            assert re.search(rf"^ *# +{re.escape(entry.source)}: ", result.text, re.MULTILINE), entry
    assert written <= {
        *(target for outcome in result.outcomes for target in outcome.targets),
        *(format_path(item.path) for item in result.added),
        "recipe",
    }


def test_arithmetic_of_references_is_computed() -> None:
    text = converted(DATA / "reasoning" / "reinpp_vllm.yaml").text
    # 28_672 is a number in the files of OmegaConf.
    assert "max_new_tokens: 27648" in text
    assert "seq_length: 28672" in text


@by_name
def test_comments_stay(file: Path) -> None:
    result = converted(file)
    for comment in comments(file):
        assert comment in result.text, comment


def comments(file: Path) -> list[str]:
    """Return the comments of a file, but for those in its defaults list, of which nothing is left."""
    result: list[str] = []
    in_defaults = False
    for line in file.read_text().splitlines():
        if line and not line[0].isspace() and not line.startswith(("#", "-")):
            in_defaults = line.startswith("defaults")
        match = re.search(r"(?:^|\s)(#.*)$", re.sub(r"\"[^\"]*\"", "", line))
        if match and not in_defaults and "Not a comment" not in line:
            result.append(match[1].strip())
    return result


@by_name
def test_what_was_converted_is_no_longer_of_another_project(file: Path) -> None:
    """The text holds no reference in a form that only OmegaConf reads."""
    values = "\n".join(line.partition(" #")[0] for line in converted(file).text.splitlines() if "# " not in line[:12])
    assert not re.search(r"\$\{(?:\.|oc\.|now:|hydra:|[a-z_]+:(?!-))", values.replace("${env:", ""))


def plain(node: Any) -> Any:
    """Return a tree as OmegaConf gives it: numbers by their value, references as text."""
    if isinstance(node, MappingNode):
        return {entry.key.raw: plain(entry.value) for entry in node.entries}
    if isinstance(node, SequenceNode):
        return [plain(item) for item in node.items]
    return node.value if node.plain else node.raw


@pytest.mark.parametrize(
    "file", [file for file in JOBS if file.suffix == ".yaml"], ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_a_file_is_composed_as_hydra_composes_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf

    monkeypatch.setenv("EMBODIED_CONFIGS", "/nowhere")
    monkeypatch.setenv("SHARED_CONFIGS", ENVIRON["SHARED_CONFIGS"])
    with hydra.initialize_config_dir(str(file.parent), version_base="1.3"):
        theirs = OmegaConf.to_container(hydra.compose(file.stem), resolve=False)
    ours = plain(composed(file).tree)
    ours.pop("hydra", None)
    # A component that is placed alone leaves the group that a base has placed; Hydra would place it twice.
    for item in (ours, theirs):
        item.get("cluster", {}).pop("component_placement", None)
    assert ours == theirs


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *(("010", 8), ("-010", -8), ("0b11", 3), ("-0x10", -16), ("1_0", 10), ("1_000.5", 1000.5), ("1:30", 90)),
        *(("09", "09"), ("0o10", "0o10"), ("+.5", "+.5"), ("off", False), ("2026-01-02", "2026-01-02")),
        *(("1" * 1001, "1" * 1001), ("0b_", "0b_"), ("=", "=")),
    ],
)
def test_plain_values_are_those_of_yaml_1_1(tmp_path: Path, written: str, value: object) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"a: {written}\n", encoding="utf-8")
    assert plain(composed(file).tree) == {"a": value}


PAGE = Path(__file__).parents[4] / "docs" / "migrate.md"


def test_the_example_becomes_what_is_shown(tmp_path: Path) -> None:
    shown = dict(
        re.findall(r"^```yaml file=(\S+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
    file = text_file(tmp_path / "before.yaml", shown["before.yaml"])
    job, _ = read_job(str(file), [], [], {})
    assert job is not None
    assert convert(job, {}).text == shown["after.yaml"]


JOB = """actor: {model: {}}
rollout: {}
env: {}
algorithm: {adv_type: gae}
cluster: {num_nodes: 1}
runner:
  task_type: embodied
"""


def imported(folder: Path, text: str) -> Converted:
    file = text_file(folder / "job.yaml", JOB + text)
    job, _ = read_job(str(file), [], [], {})
    assert job is not None
    return convert(job, {})


def reason(text: str) -> str:
    """Return why `${t0}` has no value in a file."""
    tree = read(SourceText("a.yaml", text), Diagnostics())
    assert isinstance(tree, MappingNode)
    with pytest.raises(UnresolvableError) as caught:
        References(tree, {}).value(("t0",))
    return str(caught.value)


def chain(written: str, end: str, links: int = 30) -> str:
    """Return keys that each refer to the next one."""
    lines = [f"t{link}: {written.replace('NEXT', f't{link + 1}')}\n" for link in range(links)]
    return "".join([*lines, f"t{links}: {end}\n"])


@pytest.mark.security
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (chain("${NEXT}${NEXT}", "x", 18), "text of more than 65536 characters|too many to follow"),
        (chain("${NEXT}${NEXT}", "''", 35), "too many to follow"),
        (
            chain("'${oc.select:NEXT,${oc.select:NEXT,${nothing}}}'", "${nothing}", 30),
            "too many to follow|back to itself|refers to nothing",
        ),
        (chain("'${multiply:${NEXT},${NEXT}}'", "99", 10), "computes a number that is too large"),
        ("t0: '${multiply:1e308,1e308}'\n", "computes a number that is too large"),
        (f"t0: '${{divide:{'9' * 400},1}}'\n", "computes a number that is too large"),
        (f"t0: '${{max:{'9' * 400},1}}'\n", "computes a number that is too large"),
        # Reasons are short.
        (f"t0: '${{oc.env:{'A' * 100_000}}}'\n", "too many to follow"),
        (f"t0: '${{{'a' * 100_000}'\n", "aaa"),
    ],
)
def test_references_end(text: str, words: str) -> None:
    why = reason(text)
    assert any(part in why for part in words.split("|"))
    assert len(why) <= 300


@pytest.mark.security
@pytest.mark.parametrize(
    "text", [chain("{l: '${NEXT}', r: '${NEXT}'}", "{x: 1}"), chain("[{l: '${NEXT}'}, {r: '${NEXT}'}]", "{x: 1}")]
)
def test_sections_that_refer_to_sections_end(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_cli.importing.decisions._MOST_KEYS", 100)
    outcomes = imported(tmp_path, text).outcomes
    assert len(outcomes) < 1000
    assert any(outcome.fate is not Fate.CARRIED for outcome in outcomes)


@pytest.mark.security
def test_pipes_and_devices_in_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "whole.yaml").write_text(JOB)
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "round").symlink_to(tmp_path)
    files, _ = job_files(tmp_path)
    assert sorted(file.name for file in files) == ["loop.yaml", "pipe.yaml", "whole.yaml", "zero.yaml"]
    for name in ("pipe", "zero", "loop"):
        job, findings = read_job(str(tmp_path / f"{name}.yaml"), [], [], {})
        assert job is None
        assert not findings.ok


SECRET = "s3cret-t0ken"
ALIASES = f"{{0}}: &{{0}} [{', '.join(['*{1}'] * 20)}]\n"
HOSTILE = {
    # Hydra follows a reference where a file sets keys below it.
    "g/environment.yaml": "p: '${oc.create:{k: ${oc.env:TOKEN}}}'\nq: '${oc.env:TOKEN}'\n",
    "g/doubling.yaml": chain("'${NEXT}${NEXT}'", "x", 60) + "p: '${t0}'\nq: '${oc.decode:${t0}}'\n",
    "g/wide.yaml": f"defaults: [{', '.join(f'wider@p{index}' for index in range(10))}]\n",
    "g/wider.yaml": f"defaults: [{', '.join(f'widest@p{index}' for index in range(10))}]\n",
    "g/widest.yaml": f"defaults: [{', '.join(f'environment@p{index}' for index in range(10))}]\n",
    "g/aliases.yaml": "a: &a [x, x, x, x]\n" + "".join(map(ALIASES.format, "bcdefg", "abcdef")),
    "planted/__init__.py": f"raise SystemExit('{SECRET}')\n",
    "planted/job.yaml": "a: 1\n",
    "hydra_plugins/planted.py": f"raise SystemExit('{SECRET}')\n",
}


@pytest.mark.security
@pytest.mark.parametrize(
    ("defaults", "says"),
    [
        ("g/environment@extra", "extra.p.x"),
        ("g/doubling@extra", "63 not available"),
        ("g/wide@extra", "the defaults lists name more than 500 files"),
        ("g/aliases@extra", "more than 500000 values"),
        ("'${oc.env:TOKEN}@extra'", "not a valid item of a defaults list"),
        ("job2", "packages are not imported"),
    ],
)
def test_composing_reads_no_secret_runs_nothing_and_ends(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defaults: str, says: str
) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Hydra looks for plugins once in a process.
    kept = {kind: instance for kind, instance in Singleton._instances.items() if kind is not Plugins}
    monkeypatch.setattr(Singleton, "_instances", kept)
    for name, text in HOSTILE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    search = "hydra: {searchpath: ['pkg://planted']}\n"
    (tmp_path / "job.yaml").write_text(f"defaults: [{defaults}, _self_]\n{search}{JOB}extra: {{p: {{x: 1}}}}\n")
    ended = cli("import", str(tmp_path / "job.yaml"))
    assert says in ended.out + ended.err
    written = [path.read_text() for path in tmp_path.glob("*.rlinf.yaml")]
    assert SECRET not in "".join([ended.out, ended.err, *written])


TEXT = """
a:
  b: 3
  c: ${.b}
  d: ${..e.f}
  self: ${a.self}
  one: ${.other}
  other: ${.one}
e:
  f: x
  list: [10, 20]
  open: "${a.b"
"""


def rewritten(text: str, *, carried: bool = True) -> tuple[str, str | None]:
    """Return a value at `a.new` in our form; `a.b` and `e.f` are carried over as `x.b` and `y.f`."""
    names = {("a", "b"): ("x", "b"), ("e", "f"): ("y", "f")} if carried else {}
    whole = read(SourceText("a.yaml", TEXT.replace("a:\n", f"a:\n  new: {json.dumps(text)}\n", 1)), Diagnostics())
    assert whole is not None
    node = find(whole, ("a", "new"))
    assert isinstance(node, ScalarNode)
    result = References(whole, {"SET": "4"}).rewritten(node, ("a", "new"), names)
    return result.raw, result.note


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("${a.b}", "${x.b}"),
        ("${.b}", "${x.b}"),
        ("${..e.f}", "${y.f}"),
        ("in ${.b} and ${e.f}", "in ${x.b} and ${y.f}"),
        ("${oc.env:HOME}/results", "${env:HOME}/results"),
        ("${oc.env:HOME,/tmp}", "${env:HOME:-/tmp}"),
        ("${oc.env:HOME,'/tmp'}", "${env:HOME:-/tmp}"),
        ("${oc.env:HOME,null}", "${env:HOME:-}"),
        ("${oc.env:HOME,${a.b}}", "${env:HOME:-3}"),
        ("${env:HOME}", "${env:HOME}"),
    ],
)
def test_what_is_carried_over_stays_a_reference(text: str, ours: str) -> None:
    assert rewritten(text) == (ours, None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${a.b}", "3"),
        ("${.c}", "3"),
        ("${a.d}-${a.b}", "x-3"),
        ("${e.list.1}", "20"),
        ("${e.list[0]}", "10"),
        ("${multiply:${a.b},4}", "12"),
        ("${int_div:${e.list.1}, ${subtract:${a.b},1}}", "10"),
        ("${oc.select:a.b,7}", "3"),
        ("${oc.select:a.nothing,7}", "7"),
        ("${oc.decode:${oc.env:N,5}}", "5"),
        ("${multiply:${oc.env:SET},2}", "8"),
    ],
)
def test_what_is_not_carried_over_is_replaced_by_its_value(text: str, value: str) -> None:
    raw, note = rewritten(text, carried=False)
    assert raw == value
    assert note is not None
    assert text in note


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("${a.nothing}", "refers to nothing"),
        ("${a.self}", "refers back to itself"),
        ("${a.one}", "refers back to itself"),
        ("${......b}", "points above the root of the file"),
        ("${now:%Y}", "every run gets its own folder"),
        ("${hydra:runtime.cwd}", "does not exist here"),
        ("${seed_of:run}", "no resolver `seed_of`"),
        ("${int_div:1,0}", "divides by 0"),
        ("${multiply:a,2}", "`a` is not a number"),
        ("${e}", "a section or a list"),
        ("${a.b", "is not a reference"),
        ("${e.open}", "is not a reference"),
        ("${a.${a.b}}", "is not a reference"),
        ("${oc.select:${e.f}}", "is not a reference"),
        ("${oc.create:${e.f}}", "no resolver `oc.create`"),
    ],
)
def test_what_cannot_be_known_says_why(text: str, why: str) -> None:
    with pytest.raises(UnresolvableError, match=why.replace("(", r"\(")):
        rewritten(text, carried=False)
