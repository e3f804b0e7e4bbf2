"""The time limit of a Slurm job, as its environment tells it."""

from __future__ import annotations

import pytest

from rlinf_cli.why.incidents import REACHED, limit_reached

END = 1_795_680_000


@pytest.mark.parametrize(("before", "near"), [(30, True), (-5, True), (599, True), (3600, False), (-3600, False)])
def test_limit_is_told_near_its_moment(before: int, near: bool) -> None:
    words = limit_reached({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": str(END)}, END - before)
    assert (words is not None) == near
    assert words is None or words.startswith(f"Slurm job 17 {REACHED} at 20")


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_END_TIME": "soon"}, {"SLURM_JOB_END_TIME": "\u0663"}])
def test_no_limit_is_told_without_one(environ: dict[str, str]) -> None:
    assert limit_reached(environ, END) is None
