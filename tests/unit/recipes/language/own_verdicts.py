"""Functions that judge answers, in a module that a process of rewards imports at once."""

from __future__ import annotations


def always_right(text: str) -> float:
    """Call every reply right."""
    return 1.0


def wants_a_form(text: str, answer: str) -> float:
    """Take what stands after the mark of GSM8K."""
    return float(text == f"#### {answer}")


def takes_all(text: str, answer: str) -> float:
    """Fail where the answer is 0."""
    if answer == "0":
        raise ZeroDivisionError("by zero")
    return float(text == answer)
