"""Files of others that a conversion must not believe: they end, take little, and name what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

from rlinf_cli.importing.convert import Converted, convert
from rlinf_cli.importing.references import References, UnresolvableError
from rlinf_cli.importing.rules.shared import Fate
from rlinf_cli.importing.sources import job_files, read_job
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import read
from rlinf_core.config.source import SourceText
from rlinf_core.config.tree import MappingNode

pytestmark = pytest.mark.security
JOB = """actor: {model: {}}
rollout: {}
env: {}
algorithm: {adv_type: gae}
cluster: {num_nodes: 1}
runner:
  task_type: embodied
"""


def imported(folder: Path, text: str) -> Converted:
    file = folder / "job.yaml"
    file.write_text(JOB + text)
    job = read_job(str(file), [], [], {})
    assert job.file is not None
    return convert(job.file, {})


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
    ],
)
def test_references_end(text: str, words: str) -> None:
    assert any(part in reason(text) for part in words.split("|"))


def test_reasons_are_short() -> None:
    assert len(reason(f"t0: '${{oc.env:{'A' * 100_000}}}'\n")) <= 300
    assert len(reason(f"t0: '${{{'a' * 100_000}'\n")) <= 300


@pytest.mark.parametrize(
    "text", [chain("{l: '${NEXT}', r: '${NEXT}'}", "{x: 1}"), chain("[{l: '${NEXT}'}, {r: '${NEXT}'}]", "{x: 1}")]
)
def test_sections_that_refer_to_sections_end(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_cli.importing.decisions._MOST_KEYS", 100)
    outcomes = imported(tmp_path, text).outcomes
    assert len(outcomes) < 1000
    assert any(outcome.fate is not Fate.CARRIED for outcome in outcomes)


def test_pipes_and_devices_in_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "whole.yaml").write_text(JOB)
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "round").symlink_to(tmp_path)
    files, _ = job_files(tmp_path)
    assert sorted(file.name for file in files) == ["loop.yaml", "pipe.yaml", "whole.yaml", "zero.yaml"]
    for name in ("pipe", "zero", "loop"):
        job = read_job(str(tmp_path / f"{name}.yaml"), [], [], {})
        assert job.file is None
        assert not job.diagnostics.ok


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
