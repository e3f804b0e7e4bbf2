"""`rlinf export` of runs that it cannot export; exports themselves are tried in tests/integration/cli."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.unit.cli.conftest import Cli


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("unheard-of", "there is no recipe `unheard-of`"), ("math", "`cluster`")],
)
def test_a_run_that_cannot_be_exported_says_why(cli: Cli, tmp_path: Path, recipe: str, message: str) -> None:
    logger = {"experiment_name": "one", "log_path": str(tmp_path)}
    run = RunFolder.create(RunnerConfig.model_validate({"logger": logger}), recipe)
    text = "recipe: unheard-of\n" if recipe == "unheard-of" else "recipe: math\ndata: {train_data_paths: problems}\n"
    run.write_config_text(text)
    ended = cli("export", run.path)
    assert ended.code != 0
    assert message in ended.err
