from __future__ import annotations

import pytest
import torch

from recipes.language.models.fingerprint import Fingerprint, fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 5, 8192, 40_001])
def test_it_depends_on_contents_and_not_on_where_they_lie(dtype: torch.dtype, size: int) -> None:
    values = (torch.arange(size) % 251).to(dtype)
    moved = torch.cat((torch.zeros(3).to(dtype), values))[3:]

    assert fingerprint([("a", values)]) == fingerprint([("a", moved)])
    for place in {0, size // 2, size - 1} if size else set[int]():
        torn = values.clone()
        torn[place] += 1
        assert fingerprint([("a", torn)]) != fingerprint([("a", values)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 8193, 300_001])
def test_a_copy_on_the_way_keeps_the_fingerprint(dtype: torch.dtype, size: int) -> None:
    values = (torch.arange(size) % 251).to(dtype)
    around = torch.zeros(size + 6, dtype=dtype)
    digest = Fingerprint()
    digest.add("a", values, copy_to=around[3:-3])

    assert digest.text() == fingerprint([("a", values)])
    assert torch.equal(around[3:-3], values)
    assert not around[:3].any()
    assert not around[-3:].any()


@pytest.mark.parametrize("target", [torch.empty(5), torch.empty(6, dtype=torch.float64), torch.empty(12)[::2]])
def test_memory_of_another_form_is_never_written(target: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="`a` cannot be copied"):
        Fingerprint().add("a", torch.arange(6.0), copy_to=target)


def test_fingerprint_depends_on_names_shapes_and_types() -> None:
    one, two = torch.arange(6.0), torch.arange(4.0)
    result = fingerprint([("a", one), ("b", two)])

    assert result == fingerprint([("b", two), ("a", one)])
    others = [
        [("a", two), ("b", one)],
        [("a", one), ("c", two)],
        [("a", one.view(2, 3)), ("b", two)],
        [("a", one.double()), ("b", two)],
        [("a", one)],
    ]
    assert result not in {fingerprint(other) for other in others}
