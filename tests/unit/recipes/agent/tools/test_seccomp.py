"""The filter of system calls, read as the kernel reads it."""

from __future__ import annotations

import struct

import pytest

from recipes.language.sandbox import seccomp

pytestmark = pytest.mark.security

ALLOWED, REFUSED, NO_FAMILY, ENDED = 0x7FFF0000, 0x00050001, 0x00050061, 0x80000000
X86_64, AARCH64, I386, ARM = 0xC000003E, 0xC00000B7, 0x40000003, 0x40000028
# socket, socketpair, read, bpf, io_uring_setup
CALLS = {"x86_64": (41, 53, 0, 321, 425), "aarch64": (198, 199, 63, 280, 425)}
NUMBERS = {"x86_64": X86_64, "aarch64": AARCH64}


def verdict(machine: str, architecture: int, call: int, argument: int = 0) -> int:
    """Return what a filter says of a call."""
    data = struct.pack("=IIQQ", call, architecture, 0, argument)
    program = seccomp.refusing(machine)
    assert program is not None
    steps = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        operation, right, wrong, operand = steps[at]
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x15:
            at += right if value == operand else wrong
        elif operation == 0x35:
            at += right if value >= operand else wrong
        else:
            assert operation == 0x06
            return operand


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_only_sockets_that_a_namespace_holds_are_made(machine: str) -> None:
    for call in CALLS[machine][:2]:
        allowed = {family for family in range(256) if verdict(machine, NUMBERS[machine], call, family) == ALLOWED}
        assert allowed == {1, 2, 10, 16}
        assert verdict(machine, NUMBERS[machine], call, 40) == NO_FAMILY
        # The kernel takes the lower half of the argument.
        assert verdict(machine, NUMBERS[machine], call, (1 << 32) | 40) == NO_FAMILY
        assert verdict(machine, NUMBERS[machine], call, 0xFFFFFFFF) == NO_FAMILY


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls(machine: str) -> None:
    *_, read, bpf, ring = CALLS[machine]
    assert verdict(machine, NUMBERS[machine], read) == ALLOWED
    assert verdict(machine, NUMBERS[machine], bpf) == verdict(machine, NUMBERS[machine], ring) == REFUSED


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("architecture", [I386, ARM, 0])
def test_calls_of_another_architecture_end_the_process(machine: str, architecture: int) -> None:
    # `socketcall` is among them: it makes sockets of a family that a filter cannot see.
    for call in (102, 359, 0):
        assert verdict(machine, architecture, call, 40) == ENDED


def test_second_names_of_calls_are_refused() -> None:
    for call in (41, 53, 0):
        assert verdict("x86_64", X86_64, 0x40000000 | call, 2) == REFUSED


def test_machine_whose_calls_are_not_known_has_no_filter() -> None:
    assert seccomp.refusing("riscv64") is None
