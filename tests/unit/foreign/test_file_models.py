"""What is told of a file's field that has a wrong value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.foreign.file_models import read_model
from rlinf_core.runners.storage.manifest_file import ManifestFile


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"facts": {"a": [1]}}, "`facts.a` is `[1]`, but it should be a text, a number, true, false or null"),
        ({"facts": [1]}, "`facts` is `[1]`, but it should be a mapping"),
        ({"metrics": {"loss": "x"}}, '`metrics.loss` is `"x"`, but it should be a number'),
        ({"files": {"../a": 1}}, '`files` has the key `"../a"`, but a file of a checkpoint is named relative to its'),
        ({"digests": {"a": None}}, "`digests.a` is `null`, but it should be a text"),
        ({"step": True}, "`step` is `true`, but it should be a whole number"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({"schema": "rlinf.checkpoint/1", "step": 1, **fields}))

    with pytest.raises(OSError, match="invalid value") as caught:
        read_model(file, ManifestFile)

    assert message in str(caught.value.strerror)
