"""`make chaos` before anything starts: the faults that it lists, and the jobs that it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf_core.errors import RunError
from tests.chaos.__main__ import main
from tests.chaos.campaign import prepare_folder
from tests.chaos.disturbed_run import flip_bit


def test_dry_run_lists_the_faults_of_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("embodied/pick-laptop", "runner.max_steps=20", "--seeds", "5", "--fault", "kill", "--dry-run")
    assert main(arguments) == 0
    assert "nothing was started" in capsys.readouterr().err
    assert main((*arguments, "--json")) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "rlinf.chaos_plan/1"
    assert [run["seed"] for run in record["runs"]] == [0, 1, 2, 3, 4]
    assert {strike["fault"].partition("-")[0] for run in record["runs"] for strike in run["strikes"]} == {"kill"}
    assert main((*arguments[:2], *arguments[4:], "--first-seed", "3", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0] == record["runs"][3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("embodied/pick-laptop", "runner.max_steps=-1"), "the job has no end"),
        (("hetero18",), "faults are planted into no job with robots"),
        (("embodied/pick-laptop", "--fault", "kil"), "there is no fault `kil`"),
        (("embodied/pick-laptop", "cluster.num_nodes=2"), "planted on this machine only"),
    ],
)
def test_job_is_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    assert main((*arguments, "--dry-run")) == 2
    assert words in capsys.readouterr().err


def test_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "seed-0" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("kept")
    with pytest.raises(RunError, match="other files"):
        prepare_folder(tmp_path)
    assert mine.read_text() == "kept"
    fresh = tmp_path / "fresh"
    prepare_folder(fresh)
    (fresh / "seed-0").mkdir()
    prepare_folder(fresh)
    assert (fresh / "seed-0").is_dir()


def test_one_bit_is_flipped(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(100))
    flip_bit(file)
    assert sum(byte.bit_count() for byte in file.read_bytes()) == 1
