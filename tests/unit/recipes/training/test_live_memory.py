"""Bytes of tensors that live at a time, without their memory."""

from __future__ import annotations

import torch

from recipes.training.memory.host_memory import LARGEST_KEPT
from recipes.training.memory.live_memory import HeapMemory, LiveMemory

MIB = 2**20


def of(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="meta")


def test_the_peak_is_of_what_lives_at_a_time() -> None:
    with LiveMemory() as live:
        one = of(4)
        two = of(2)
        del one
        three = of(1)
    assert live.peak == 6 * MIB
    assert live.now == two.nbytes + three.nbytes == 3 * MIB


def test_larger_tensors_may_be_left_out() -> None:
    with LiveMemory(largest=2 * MIB) as live:
        tensors = of(4), of(2), of(1)
    assert live.peak == 3 * MIB
    assert len(tensors) == 3


def test_views_and_tensors_from_outside_are_not_counted() -> None:
    outside = of(4)
    with LiveMemory() as live:
        view = outside[: 2 * MIB].view(2, MIB)
        new = view + view
        part = new[0]
        del new
    assert live.peak == live.now == 2 * MIB
    assert part.nbytes == MIB


def test_what_the_backward_pass_needs_lives_until_it_is_over() -> None:
    weight = torch.empty(MIB, device="meta", requires_grad=True)
    with LiveMemory() as live:
        loss = weight.exp().exp().sum()
        # Both results are kept; of the sum a number.
        assert live.now == 8 * MIB + 4
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        del loss
        assert weight.grad is not None
        assert live.now == weight.grad.nbytes


def test_tensors_that_are_too_large_for_the_heap_are_mapped() -> None:
    large = LARGEST_KEPT // MIB + 1
    with HeapMemory() as live:
        one, two = of(large), of(large)
        del one
        three = of(LARGEST_KEPT // MIB)
    assert (live.mapped, live.most_mapped) == (two.nbytes, 2 * large * MIB)
    assert live.now == two.nbytes + three.nbytes
    del two, three
    assert live.mapped == live.now == 0
