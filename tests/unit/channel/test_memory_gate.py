from __future__ import annotations

from rlinf_core.channel.broker_clients import MIB, MemoryGate


class Machine:
    def __init__(self, free: int) -> None:
        self.free = free

    def __call__(self) -> int:
        return self.free


def test_gate_closes_below_the_reserve_and_reopens_above() -> None:
    machine = Machine(100 * MIB)
    gate = MemoryGate(machine, reserve=80 * MIB)
    assert not gate.add(10 * MIB)
    machine.free = 79 * MIB
    assert gate.add(5 * MIB)
    assert gate.closed
    machine.free = 99 * MIB
    assert not gate.look()
    machine.free = 100 * MIB
    assert gate.look()
    assert not gate.closed


def test_small_changes_cost_no_look() -> None:
    machine = Machine(0)
    gate = MemoryGate(machine, reserve=MIB)
    for _ in range(3):
        assert not gate.add(MIB)
    assert gate.add(MIB)
    assert gate.held == 4 * MIB


def test_empty_channel_is_open_however_little_memory_is_free() -> None:
    gate = MemoryGate(Machine(0), reserve=MIB)
    assert not gate.look()
    assert gate.add(8 * MIB)
    assert gate.add(-8 * MIB)
    assert not gate.closed
