"""Words of messages."""

from __future__ import annotations

import pickle

from rlinf_core.errors import ConfigError
from rlinf_core.suggest import clipped


def test_long_text_is_clipped_in_the_middle_at_blanks() -> None:
    assert clipped("short") == "short"
    text = clipped(f"`{'x' * 100_000}` is no name")
    assert text.startswith("`xxx")
    assert text.endswith("is no name")
    assert len(text) < 1_100
    secret = "s" * 90
    assert secret[:20] not in clipped("a" * 600 + f" {secret} " + "b" * 5_000)
    lines = clipped("\n".join(["y" * 2_000] * 1_000))
    assert len(lines) < 60_000
    assert max(map(len, lines.splitlines())) < 1_100


def test_errors_clip_what_they_quote() -> None:
    error = ConfigError("m" * 9_999, where="w" * 9_999, why="y" * 9_999, help="h" * 9_999)
    assert len(str(error)) < 5_000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
