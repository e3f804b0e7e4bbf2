"""Budgets of what a file or a message claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf_core.foreign.budget import Budget, OverBudgetError, in_words, json_size


def test_claims_are_added_up() -> None:
    budget = Budget(100, "a body")
    budget.take(60)
    budget.take(40)
    with pytest.raises(OverBudgetError, match=r"^claims 101 bytes up to row 3; a body may take 100 bytes$"):
        budget.take(1, "row 3")


def test_file_may_claim_a_multiple_of_its_size(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(1000))
    large.write_bytes(bytes(4 << 20))
    assert Budget.of_files(small).left == 128 << 20
    assert Budget.of_files(large).left == 512 << 20
    assert Budget.of_files(small, large).left == 128 * (1000 + (4 << 20))


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**62, 2**62, 2**62), (10**9, 1)])
def test_shape_that_overflows_is_a_claim(shape: tuple[int, ...]) -> None:
    with pytest.raises(OverBudgetError, match=r"^claims .* TiB up to `a`|^claims 3.7 GiB up to `a`"):
        Budget(1 << 20, "a file").take_array(shape, 4, "`a`")


def test_empty_arrays_claim_nothing() -> None:
    budget = Budget(0, "a file")
    budget.take_array((2**40, 0), 4)
    assert budget.left == 0


@pytest.mark.parametrize("value", [[{}] * 50, list(range(50)), {str(key): [] for key in range(50)}, ["a" * 100] * 50])
def test_size_of_json_covers_its_values(value: object) -> None:
    text = json.dumps(value)
    assert json_size(text) == json_size(text.encode())
    assert json_size(text) >= len(text) + 50 * 64


def test_bytes_in_words() -> None:
    assert [in_words(size) for size in (3, 5120, 1 << 20, 3 << 29, 1 << 40)] == [
        "3 bytes",
        "5 KiB",
        "1 MiB",
        "1.5 GiB",
        "1 TiB",
    ]
