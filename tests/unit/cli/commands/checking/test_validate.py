"""`rlinf validate`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config.validating import key_findings
from tests.unit.cli.typed import Cli, text_file

Contract = Callable[[str, str], Any]
RLINF = Path(sys.executable).with_name("rlinf")

GOOD = "cluster:\n  num_nodes: 1\n"
BAD = "cluster:\n  num_nodes: 0\n  nodegroups: []\n"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return text_file(tmp_path / "good.yaml", GOOD)


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return text_file(tmp_path / "bad.yaml", BAD)


def test_every_mistake_at_its_place_in_one_run(cli: Cli, bad: Path) -> None:
    ended = cli("validate", bad)
    assert (ended.code, ended.err) == (2, "")
    places = [line.partition(" error[")[0] for line in ended.out.splitlines() if " error[" in line]
    assert places == [f"{bad}:2:14:", f"{bad}:3:3:"]
    assert ended.out.endswith(f"\n\n{bad}: 2 errors\n")
    ended = cli("validate", bad, "--github")
    assert [line.partition(" ")[0] for line in ended.out.splitlines()] == ["::error", "::error"]
    assert ended.err == f"{bad}: 2 errors\n"


@pytest.mark.parametrize(
    ("name", "shown"), [("good.yaml", "good.yaml"), ("lr=1.yaml", "lr=1.yaml"), ("a\n\x1b[31mb", "a\\x0a\\x1b[31mb")]
)
def test_a_valid_file_says_so(cli: Cli, tmp_path: Path, name: str, shown: str) -> None:
    ended = cli("validate", text_file(tmp_path / name, GOOD))
    assert (ended.code, ended.out, ended.err) == (0, f"{tmp_path}/{shown}: valid\n", "")


def test_findings_are_not_wrapped_in_a_pipe(cli: Cli, tmp_path: Path) -> None:
    path = text_file(tmp_path / "long.yaml", f"cluster:\n  num_nodes: 1\n  {'k' * 300}: 1\n")
    first = cli("validate", path).out.splitlines()[0]
    assert first.startswith(f"{path}:3:3: error[unknown-key]")
    assert "k" * 300 in first


def test_warnings_do_not_fail(cli: Cli, tmp_path: Path) -> None:
    path = text_file(tmp_path / "pasted.yaml", "\tcluster:\n\t  num_nodes: 1\n")
    out = cli.out("validate", path)
    assert "warning[indented-file]" in out
    assert out.endswith(f"\n\n{path}: valid, with 1 warning\n")


def test_quiet_leaves_the_findings(cli: Cli, bad: Path, good: Path) -> None:
    assert "error[unknown-key]" in cli("validate", bad, "--quiet").out
    assert "2 errors" not in cli("validate", bad, "-q").out
    assert cli("--quiet", "validate", good).out == ""


def test_several_files(cli: Cli, good: Path, bad: Path, contract: Contract) -> None:
    assert cli.printed(2, "validate", good, bad).endswith(f"\n\n{good}: valid\n{bad}: 2 errors\n")
    data = contract("validate", cli("validate", good, bad, "--json").out)
    assert {diagnostic["file"] for diagnostic in data["diagnostics"]} == {str(bad)}
    assert data["files"] == [str(good), str(bad)]
    assert data["ok"] is False


def test_overrides_go_to_every_file(cli: Cli, good: Path, bad: Path) -> None:
    assert cli("validate", bad, "cluster.num_nodes=1", "~cluster.nodegroups").code == 0
    assert "<overrides>:1:19: error[" in cli.printed(2, "validate", good, "cluster.num_nodes=zero")


def test_assumptions_are_checked_against_the_ranges(cli: Cli, tmp_path: Path) -> None:
    path = text_file(tmp_path / "ranges.yaml", "cluster:\n  num_nodes: 1\n  component_placement: {actor: 0-8}\n")
    assert cli("validate", path).code == 0
    assert "error[placement-out-of-range]" in cli.printed(2, "validate", path, "--assume", "8")
    assert cli("validate", path, "--assume", "9").code == 0
    assert "error[bad-assumption]" in cli("validate", path, "--assume", "nothing=8").out


def test_a_recipe_stands_for_the_config_that_it_starts_from(cli: Cli) -> None:
    assert cli("validate", "recipe=math").out == "recipe=math: valid\n"
    ended = cli("validate", "recipe=math", "runner.max_stepz=1")
    assert (ended.code, "did you mean `max_steps`?" in ended.out) == (2, True)
    assert "sums-laptop.yaml" in cli("inspect", "placement", "recipe=math").out
    assert "did you mean `math`?" in cli.fails(2, "validate", "recipe=maths")


def test_standard_input(rlinf: Cli) -> None:
    assert rlinf("validate", "-", stdin=GOOD.encode()).code == 0
    ended = rlinf("validate", "-", stdin=BAD.encode())
    assert ended.code == 2
    assert ended.out.startswith("<stdin>:2:14: error[")
    assert ended.out.endswith("\nstandard input: 2 errors\n")
    assert ended.err == ""


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (None, "missing-file"),
        (None, "is-directory"),
        (b"", "empty-file"),
        (b"\xff\xfe\x00binary", "not-utf8"),
        (b"\x7fELF\x00\x01\x02", "control-character"),
        (b"a: [1", "yaml-syntax"),
        (b"a: 1\n---\nb: 1\n", "several-documents"),
        (b"- 1\n", "not-a-mapping"),
    ],
)
def test_what_cannot_be_read_is_2_in_every_form(
    cli: Cli, contract: Contract, tmp_path: Path, data: bytes | None, code: str
) -> None:
    path = tmp_path / "file.yaml"
    if data is not None:
        path.write_bytes(data)
    elif code == "is-directory":
        path.mkdir()
    assert f"error[{code}]" in cli.printed(2, "validate", path)
    result = contract("validate", cli("validate", path, "--json").out)
    assert code in [diagnostic["code"] for diagnostic in result["diagnostics"]]
    assert f"::error title=rlinf ({code}),file={path}" in cli.printed(2, "validate", path, "--github")


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = text_file(tmp_path / "secret.yaml", GOOD)
    path.chmod(0)
    command: list[str] = []
    if os.geteuid() == 0:
        # Root reads everything, unless it gives up the right to.
        if shutil.which("setpriv") is None:
            pytest.skip("runs as root, and setpriv is not installed")
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    done = subprocess.run([*command, RLINF, "validate", path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error[unreadable-file]" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["validate", "hetero18", "-q"], "ray torch numpy"),
        (["--help"], "ray torch pydantic ruamel.yaml rich.console rlinf_core.config.model importlib.metadata hashlib"),
    ],
    ids=["validate", "help"],
)
def test_what_is_heavy_is_not_imported(arguments: list[str], heavy: str) -> None:
    program = (
        f"import sys\nfrom rlinf_cli.main import main\ncode = main({arguments})\n"
        f"loaded = {{*{heavy.split()}}} & set(sys.modules)\nassert not loaded, loaded\nsys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("command", "looks"), [("validate", "False"), ("explain", "True")])
def test_only_validate_leaves_out_plugins_of_pydantic(command: str, looks: str) -> None:
    program = (
        f"import sys\nsys.argv = ['rlinf', {command!r}, 'hetero18']\nfrom rlinf_cli import launcher\n"
        "launcher._leave_out_plugins()\nfrom pydantic import create_model\ncreate_model('Model', size=int)\n"
        "from pydantic.plugin import _loader\nprint(getattr(_loader, '_plugins', None) is not None)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYDANTIC_DISABLE_PLUGINS"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == looks


@pytest.mark.parametrize(
    "override",
    [
        "cluster.api_key=hunter2",
        "+cluster.ssh.options.Password=hunter2",
        "cluster.node_groups=[{env_vars: [{API_TOKEN:hunter2}]}]",
        "cluster.node_groups=[{env_vars: [API_TOKEN=hunter2]}]",
        "cluster.node_groups=[{env_vars: [{API_TOKEN=hunter2: 1}]}]",
        "cluster.node_groups=[{label: g, node_ranks: 9, env_configs: [{node_ranks: 9, env_vars: [KEY: $hunter2]}]}]",
        *(f"cluster.api_key={first}hunter2" for first in ("@", "%", "!", "*", "!!int ")),
    ],
)
def test_secrets_are_masked_in_what_messages_quote(cli: Cli, good: Path, override: str) -> None:
    for form in ("text", "json", "github"):
        ended = cli("validate", "--output", form, good, override)
        assert ended.code == 2
        assert "hunter2" not in ended.out + ended.err


def test_findings_of_one_kind_are_counted_after_a_hundred(cli: Cli, tmp_path: Path, contract: Contract) -> None:
    path = tmp_path / "many.yaml"
    groups = "".join(f"    - {{label: g{i}, node_ranks: 00, odd: 1}}\n" for i in range(300))
    path.write_text(f"cluster:\n  num_nodes: 01\n  node_groups:\n{groups}")
    ended = cli("validate", path, "--verbose")
    assert ended.out.count("error[unknown-key]: unknown key") == 100
    assert "error[unknown-key]: and 200 more of this kind" in ended.out
    assert "300 errors, 1 warning" in ended.out
    assert cli("validate", path, "--github").out.count("(unknown-key)") == 101
    record = contract("validate", cli("validate", path, "--json").out)
    assert len(record["diagnostics"]) == 102
    assert (record["errors"], record["warnings"]) == (300, 1)
    assert cli("inspect", "placement", path).err.count("error[unknown-key]") == 101


@pytest.mark.parametrize(
    "text",
    [
        "runner:\n" + "".join(f"  k{i}: {i}\n" for i in range(400)),
        "".join(f"k{i}: {i}\n" for i in range(400)),
        "runner:\n" + "".join(f"  k{i}: ${{nowhere.k{i}}}\n" for i in range(400)),
    ],
    ids=["of a section", "of the file", "with references"],
)
def test_no_guess_is_made_for_a_finding_that_is_only_counted(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    guessed: list[object] = []
    guess = key_findings.unknown_key

    def counted(*args: Any) -> Any:
        guessed.append(args)
        return guess(*args)

    monkeypatch.setattr(key_findings, "unknown_key", counted)
    path = text_file(tmp_path / "many.yaml", f"recipe: embodied\ncluster: {{num_nodes: 1}}\n{text}")
    assert "error[unknown-key]: and 300 more of this kind" in cli("validate", path).out
    assert len(guessed) == 100


@pytest.mark.parametrize(
    "text",
    [
        "recipe: embodied\nrunner: {? %s : 1}",
        "recipe: embodied\nrunner: {max_steps: %s}",
        "recipe: embodied\nrunner: {max_steps: '${env:A%s}'}",
        "recipe: embodied\n? %s\n: 1",
        "extends: %s.yaml",
        "recipe: %s",
    ],
)
def test_quotations_have_a_length(cli: Cli, tmp_path: Path, text: str) -> None:
    path = text_file(tmp_path / "long.yaml", f"cluster: {{num_nodes: 1}}\n{text % ('x' * 60_000)}\n")
    for form in ("text", "json", "github"):
        ended = cli("validate", "--output", form, path)
        assert ended.code == 2
        assert len(ended.out + ended.err) < 8_000
