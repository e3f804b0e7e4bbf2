"""The example of docs/migrate.md: the file that is shown becomes the file that is shown."""

from __future__ import annotations

import re
from pathlib import Path

from rlinf_cli.importing.convert import convert
from rlinf_cli.importing.sources import read_job

PAGE = Path(__file__).parents[4] / "docs" / "migrate.md"


def test_the_example_becomes_what_is_shown(tmp_path: Path) -> None:
    shown = dict(
        re.findall(r"^```yaml file=(\S+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
    file = tmp_path / "before.yaml"
    file.write_text(shown["before.yaml"])
    job = read_job(str(file), [], [], {})
    assert job.file is not None
    assert convert(job.file, {}).text == shown["after.yaml"]
