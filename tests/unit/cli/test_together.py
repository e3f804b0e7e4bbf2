"""Options that are without effect, alone or beside others, are refused: none is ignored."""

from __future__ import annotations

import pytest

from tests.unit.cli.conftest import Cli

ROWS = [
    ("inspect placement laptop --advise x --live", "'--live': it cannot be used with --advise"),
    ("inspect laptop --advise x --all", "'--all': it cannot be used with --advise"),
    ("inspect placement laptop --advise x -o a.html", "'-o': it cannot be used with --advise"),
    ("inspect placement laptop --patch a.yaml", "'--patch': it goes with --advise"),
    ("inspect placement laptop --staleness 0", "'--staleness': it goes with --advise"),
    ("inspect placement laptop --advise ,", "'--advise': name the runs"),
    ("inspect placement laptop --advise x,", "'--advise': name the runs"),
    ("inspect placement laptop --advise=", "'--advise': name the runs"),
    ("why --replay item --bundle a.tar.gz", "'--bundle': it cannot be used with --replay"),
    ("report --samples --text", "'--text': it cannot be used with --samples"),
    ("report --samples --watch", "'--watch': it cannot be used with --samples"),
    ("report --text -o a.html", "'-o': it cannot be used with --text"),
    ("report --step 3", "'--step': it goes with --samples"),
    ("report -n 10", "'--count': it goes with --samples"),
    ("ps --attach --stacks", "'--stacks': it cannot be used with --attach"),
    ("ps --attach --native", "'--native': it cannot be used with --attach"),
    ("eval laptop --no-show", "'--show': it goes with --play"),
    ("eval laptop --play --video", "'--video': it cannot be used with --play"),
    ("eval laptop --play --allow-training-starts", "'--allow-training-starts': it cannot be used with --play"),
    ("up laptop --with requeue", "'--with': it goes with --print"),
    ("up laptop --print slurm --dry-run", "'--dry-run': it cannot be used with --print"),
    ("up laptop --print slurm --node-rank 0", "'--node-rank': it cannot be used with --print"),
    ("train laptop --parallel 3", "'--parallel': it goes with a sweep"),
    ("train laptop --assume 8", "'--assume': a real run probes the machines"),
]


@pytest.mark.parametrize(("typed", "message"), ROWS)
def test_no_option_is_without_effect(cli: Cli, typed: str, message: str) -> None:
    assert f"invalid value for {message}" in cli.refuses(2, *typed.split())
