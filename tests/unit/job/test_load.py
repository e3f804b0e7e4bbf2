"""The pipeline from a file's name to a job."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.config.diagnostics import Diagnostics, Severity
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.config.shipped import shipped_config
from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.job import find_recipe
from rlinf_core.job.load import Job, load_job, rules_of
from rlinf_core.job.recipe import Recipe
from rlinf_core.job.report import Report
from rlinf_core.process.import_path import EntryPoint
from rlinf_core.scalars import Int, Text

CLUSTER = "cluster:\n  num_nodes: 1\n  component_placement: {actor: 0-3}\n"


def load(text: str, *overrides: str, assume: tuple[str, ...] = (), **environ: str) -> Job:
    return load_with_lint("-", overrides, assume=assume, stdin=text.encode(), environ=environ)


def codes(job: Job) -> list[str]:
    return [diagnostic.code for diagnostic in job.diagnostics]


class Trainer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: Int
    batch: Int = 8
    token: Text = ""


class TrainerFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: Text
    cluster: ClusterConfig
    trainer: Trainer


def check_trainer(config: TrainerFile, world_sizes: dict[str, int | None], report: Report) -> None:
    size = world_sizes.get("actor")
    if size is not None and config.trainer.batch % size:
        report(("trainer", "batch"), "toy-batch", f"`batch` {config.trainer.batch} for {size} ranks", "change it")
    if config.trainer.steps > 100:
        report(("trainer", "steps"), "toy-steps", "many `steps`", severity=Severity.WARNING)
    if config.trainer.steps == 13:
        raise ZeroDivisionError("unlucky")


TOY = Recipe("toy", "A toy.", "toy_recipe:TrainerFile", "toy", check="toy_recipe:check_trainer")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the recipe `toy`, one that is none, and one that cannot be imported."""
    module = types.ModuleType("toy_recipe")
    module.__dict__.update(TrainerFile=TrainerFile, check_trainer=check_trainer, recipe=TOY, none=3)
    lame = Recipe("lame", "Cannot be loaded.", "toy_recipe:Nothing", "toy")
    module.__dict__["lame"] = lame
    monkeypatch.setitem(sys.modules, "toy_recipe", module)
    targets = {"toy": "recipe", "none": "none", "lame": "lame", "gone": "missing"}
    points = {name: EntryPoint(name, f"toy_recipe:{target}") for name, target in targets.items()}
    monkeypatch.setattr(find_recipe, "offered", lambda _: points)


@pytest.mark.parametrize(
    "section",
    [
        *("*x", "{num_nodes: *x}", "{num_nodes: !env N}", "{num_nodes: !!int x}", "{num_nodes: !!binary aGk=}"),
        "{num_nodes: 1, component_placement: &x {a: *x}}",
    ],
)
def test_a_value_that_is_not_read_is_one_finding(section: str) -> None:
    job = load(f"cluster: {section}\n")
    assert len([item for item in job.diagnostics if item.severity is Severity.ERROR]) == 1


def test_sound_file_without_a_recipe() -> None:
    job = load(CLUSTER + "runner: {token: geheim}\nactor: {x: 1}\n", assume=("4",))
    (note,) = job.diagnostics
    assert (note.code, note.severity) == ("section-not-checked", Severity.NOTE)
    assert note.message == "without `recipe` only `cluster` is checked, not `runner`, `actor`"
    job.raise_if_bad()
    assert job.topology is not None
    assert job.topology.num_accelerators == 4
    assert (job.recipe, job.config, job.name) == (None, None, "<stdin>")
    assert repr(job) == "<Job <stdin>: valid>"
    assert repr(load("cluster: {}\n")) == "<Job <stdin>: with errors>"


@pytest.mark.usefixtures("toy")
def test_recipe_models_the_whole_file() -> None:
    text = f"recipe: toy\ntrainer: {{steps: '${{env:STEPS}}'}}\n{CLUSTER}"
    job = load(text, assume=("4",), STEPS="7")
    assert codes(job) == []
    assert job.recipe is TOY
    assert isinstance(job.config, TrainerFile)
    assert job.config.trainer.steps == 7
    assert job.config.cluster is job.cluster
    assert len(codes(load(text, assume=("4",)))) == 1


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("read", [Job.raise_if_bad, attrgetter("config")], ids=["raise_if_bad", "config"])
def test_error_holds_every_finding_and_no_secret(read: Callable[[Job], object]) -> None:
    text = "recipe: toy\ntrainer: {steps: '${env:MY_SECRET}'}\ncluster:\n  num_nodes: 0\n  num_node: 1\n"
    with pytest.raises(ConfigError) as caught:
        read(load(text, MY_SECRET="hunter2"))
    shown = str(caught.value)
    assert "<stdin>:4:14: error[bad-value]" in shown
    assert "<stdin>:5:3: error[unknown-key]" in shown
    assert "    4 |   num_nodes: 0" in shown
    assert "hunter2" not in shown


FARNKA = """cluster:
  num_nodes: 1
  node_groups:
    - {label: arms, node_ranks: 0, hardware: {type: Farnka, configs: [UNIT]}}
""".replace("UNIT", "{node_rank: 3, robot_ip: 10.0.0.1, camera_tpye: zed}")
# The section `trainer`, overrides, accelerators that are assumed, and the file besides; of each finding the code, its
# place where that is no place of the file or is asked for, and words of it.
FILE = f"recipe: toy\n{CLUSTER}"
LOADED: list[tuple[str, tuple[str, ...], str, str, list[str]]] = [
    ("steps: 300, batch: 6", (), "", FILE, ["accelerators-unknown", "toy-steps",
                                            "toy-batch at <stdin>:5:30: `batch` 6 for 4 ranks; change it"]),
    # A size that is not known yet is not judged, nor what follows from a wrong value.
    ("steps: 3, batch: 7", (), "", FILE.replace("0-3", "all"), ["accelerators-unknown"]),
    ("steps: 3, batch: 7", (), "2", FILE.replace("0-3", "all"), ["toy-batch"]),
    ("steps: 3, batch: 7", (), "7", FILE.replace("0-3", "all"), []),
    ("steps: 3, batch: x", (), "3", FILE.replace("0-3", "0-2"), ["wrong-type"]),
    # The cluster is judged whatever is wrong elsewhere.
    ("batch: 3", (), "4", FILE.replace("0-3", "0-30"), ["placement-out-of-range", "missing-key"]),
    ("steps: 13", (), "4", FILE, ["broken-recipe: the rules of recipe `toy` failed: ZeroDivisionError: unlucky"]),
    ("steps: 3", ("trainer.batch=4", "trainer.bach=4"), "4", FILE,
     ["unknown-key at <overrides>:2:9: did you mean `batch`?"]),
    ("steps: 3, zzz: 1", ("trainer.batch=x",), "4", FILE, ["unknown-key", "wrong-type at <overrides>:1:15"]),
    ("steps: 101, zzz: 1, batch: 3", (), "4", FILE.replace("toy", "toi"),
     ["unknown-recipe: did you mean `toy`?", "toy-steps", "unknown-key", "toy-batch"]),
    ("steps: 3", (), "4", FILE.replace("toy", "Toy"), ["unknown-recipe: did you mean `toy`?"]),
    ("steps: 3", (), "4", FILE.replace("toy", "toi"), ["unknown-recipe: there is no recipe `toi`"]),
    *(("steps: 3", (), "4", FILE.replace("toy", name), ["unknown-recipe: `recipe` must be the name of a recipe"])
      for name in ("[toy]", "")),
    ("steps: 3", (), "4", FILE.replace("toy", "none"),
     ["broken-recipe: recipe `none` cannot be loaded: `toy_recipe:none` is not a Recipe"]),
    *(("steps: 3", (), "4", FILE.replace("toy", name),
       [f"broken-recipe: recipe `{name}` cannot be loaded: AttributeError"]) for name in ("gone", "lame")),
    ("", (), "", FARNKA,
     ["unknown-hardware-type", "node-rank-out-of-range", "unknown-key: did you mean `camera_type`?"]),
]  # fmt: skip


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(("trainer", "overrides", "assumed", "file", "expected"), LOADED)
def test_findings(trainer: str, overrides: tuple[str, ...], assumed: str, file: str, expected: list[str]) -> None:
    text = file + (f"trainer: {{{trainer}}}\n" if trainer else "")
    job = load(text, *overrides, assume=(assumed,) if assumed else ())
    assert len(job.diagnostics) == len(expected), codes(job)
    for finding, words in zip(job.diagnostics, expected, strict=True):
        code, _, said = words.partition(": ")
        name, _, place = code.partition(" at ")
        assert finding.code == name
        assert said in f"{finding.message}; {finding.help}"
        assert str(finding.span) == place if place else finding.span.source.kind == "stdin"
    assert job.cluster is not None


def test_hardware_type_like_no_other_hides_no_other_mistake() -> None:
    """What all robots have is checked; a key that none of them has may well be one of the type that is meant."""
    units = (
        "{node_rank: 0, robot_ip: 10.0.0.999, camera_tpye: zed, payload_kg: 5}",
        "{node_rnk: 0, camera_serials: [a]}",
        "{node_rank: 3, camera_serials: [a]}",
        "5",
    )
    configs = "\n".join(f"          - {unit}" for unit in units)
    text = (
        "cluster:\n  num_nodes: 1\n  node_groups:\n    - label: zebras\n      node_ranks: 0\n      hardware:\n"
        f"        type: Zebra\n        configs:\n{configs}\n"
    )
    results = [(diagnostic.code, diagnostic.span.text) for diagnostic in load(text).diagnostics]
    assert sorted(results) == [
        ("bad-value", "10.0.0.999"),
        ("hardware-shared", "a"),
        ("node-rank-out-of-range", "3"),
        ("unknown-hardware-type", "Zebra"),
        ("unknown-key", "camera_tpye"),
        ("unknown-key", "node_rnk"),
        ("wrong-type", "5"),
    ]


@pytest.mark.parametrize("kind", ["Farnka", "Zebra"])
def test_units_of_a_wrong_type_are_counted(kind: str) -> None:
    placement = "  component_placement: {env: {node_group: arms, placement: 0-9}}\n"
    units = "[{node_rank: 0, robot_ip: 10.0.0.1}, {node_rank: 0, robot_ip: 10.0.0.2}]"
    groups = "".join(
        f"    - {{label: {label}, node_ranks: 0, hardware: {{type: {kind}, configs: {configs}}}}}\n"
        for label, configs in (("arms", units), ("none", "[]"))
    )
    job = load(f"cluster:\n  num_nodes: 1\n{placement}  node_groups:\n{groups}")
    assert codes(job) == ["placement-out-of-range", "unknown-hardware-type", "unknown-hardware-type", "hardware-empty"]
    assert "\u200b" not in " ".join(f"{diagnostic.message} {diagnostic.help}" for diagnostic in job.diagnostics)


@pytest.mark.parametrize(
    "text", ["", "[]", "a", "cluster:\n", "cluster: 3\n", "cluster: []\n", "{", "\t", "\x00", "? a"]
)
def test_hopeless_files_end_in_findings(text: str) -> None:
    job = load(text)
    assert not job.ok
    assert job.cluster is None
    assert job.topology is None
    with pytest.raises(ConfigError):
        job.raise_if_bad()


@pytest.mark.parametrize("name", ["no-such.yaml", ".", "", "a/b/c", "x" * 5000, "nul\0byte", "no_such_config"])
def test_names_of_no_file_end_in_findings(name: str) -> None:
    job = load_with_lint(name)
    assert not job.ok
    assert len(job.diagnostics) == 1


def test_assumptions_that_cannot_be_made() -> None:
    job = load(CLUSTER, assume=("4", "x", "a800=8"))
    assert [(diagnostic.code, str(diagnostic.span)) for diagnostic in job.diagnostics] == [
        ("bad-assumption", "--assume:2:1"),
        ("bad-assumption", "--assume:3:1"),
    ]


def test_loading_imports_neither_ray_nor_torch() -> None:
    script = (
        "import sys; from rlinf_core.job.load import load_job; load_job('hetero18');"
        " print(sorted({'ray', 'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_a_program_reads_the_keys_that_commands_read() -> None:
    script = (
        "from rlinf_core import load_job; job = load_job('embodied/pick-laptop', ['rollout.model_dir=/m'], environ={});"
        " print(job.config.actor.model.model_path)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "/m\n"


@pytest.mark.parametrize(
    ("override", "help"),
    [
        ("cluster.num_node=2", "did you mean `num_nodes`?"),
        ("cluster.node_group=[]", "did you mean `node_groups`?"),
    ],
)
def test_a_mistyped_override_is_meant_for_what_the_file_gives(override: str, help: str) -> None:
    job = load(f"{CLUSTER}  node_groups: []\n", override)
    assert [finding.help for finding in job.diagnostics if finding.code == "unknown-key"] == [help]


def test_a_mistyped_key_is_meant_for_what_the_base_gives(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(CLUSTER)
    (tmp_path / "child.yaml").write_text("extends: base.yaml\ncluster: {num_node: 2}\n")
    job = load_with_lint(str(tmp_path / "child.yaml"), environ={})
    assert [d.help for d in job.diagnostics if d.code == "unknown-key"] == ["did you mean `num_nodes`?"]
    # A key that the same file gives is not meant.
    (finding,) = load("cluster:\n  num_nodes: 1\n  num_node: 2\n").diagnostics
    assert (finding.help or "").startswith("known keys: ")


def test_leading_zeros_are_suspicious_in_integers_only() -> None:
    text = (
        "cluster:\n  num_nodes: 02\n  node_groups:\n    - label: 007\n      node_ranks: 00-01\n"
        "      accelerators: {per_node: 08}\n      env_configs:\n        - {node_ranks: 0, env_vars: [{A: 010}]}\n"
    )
    results = [(d.span.text, d.message) for d in load(text).diagnostics if d.code == "leading-zero"]
    assert results == [
        ("02", "`02` is read as 2; other YAML loaders read it as octal"),
        ("08", "`08` is read as 8; other YAML loaders read it as octal"),
    ]


@pytest.mark.usefixtures("toy")
def test_leading_zeros_are_seen_in_a_recipe_and_in_overrides() -> None:
    text = f"recipe: toy\ntrainer: {{steps: 010, token: 010, batch: 8}}\n{CLUSTER}"
    job = load(text, "trainer.batch=08", assume=("4",))
    assert [(d.code, str(d.span)) for d in job.diagnostics] == [
        ("leading-zero", "<stdin>:2:18"),
        ("leading-zero", "<overrides>:1:15"),
    ]


@pytest.mark.parametrize(
    ("key", "place", "help"),
    [
        ("component_placement: {a:0}", "<stdin>:3:26", "write a space after the `:`, as in `a: 0`"),
        ("component_placement:\n    a:0-7", "<stdin>:4:5", "write a space after each `:`, as in `a: 0-7`"),
        ("ports:20000-20999:", "<stdin>:3:3", "write a space after the `:`, as in `ports: 20000-20999`"),
    ],
)
def test_a_missing_space_after_a_colon_is_one_mistake(key: str, place: str, help: str) -> None:
    job = load(f"cluster:\n  num_nodes: 1\n  {key}\n")
    assert [(str(d.span), d.help) for d in job.diagnostics] == [(place, help)]


def test_a_file_hides_a_shipped_configuration_a_folder_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("extends: embodied/pick-laptop\n", encoding="utf-8")
    without = [load_job(name, environ={}) for name in ("embodied/pick-laptop", "job.yaml")]
    assert without[0].name == str(shipped_config("embodied/pick-laptop"))
    Path("embodied/pick-laptop").mkdir(parents=True)
    beside = [load_job(name, environ={}) for name in ("embodied/pick-laptop", "job.yaml")]
    assert all(job.ok for job in (*without, *beside))
    assert [job.config for job in beside] == [job.config for job in without]
    Path("hetero18").write_text("cluster:\n  num_nodes: 3\n")
    cluster = load_with_lint("hetero18").cluster
    assert cluster is not None
    assert cluster.num_nodes == 3
    (guess,) = load_with_lint("hetero8").diagnostics
    assert (guess.code, guess.help) == ("missing-file", "did you mean `hetero18`?")


def test_too_little_memory_is_no_fault_of_a_recipe() -> None:
    unread: Any = None
    with pytest.raises(RLinfError, match="too little memory"), rules_of(unread, unread, Diagnostics()):
        raise MemoryError
