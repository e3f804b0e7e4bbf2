"""Types of values in the descriptions of robots."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlinf_core.scalars import Int, Text, impossible_address, problem


def _ip_address(text: str) -> str:
    wrong = impossible_address(text)
    if wrong is not None:
        raise problem("bad-value", wrong, help="write the robot's own address, as in `10.10.10.1`")
    return text


def _serial(text: str) -> str:
    if not text.strip():
        raise problem("bad-value", "a serial number is missing here", help="remove the item or write the serial")
    return text


def _port(number: int) -> int:
    if not 0 < number < 65536:
        raise problem("bad-value", f"{number} is no TCP port", help="write a number from 1 to 65535")
    return number


def _word(text: str) -> str:
    if not text or not text.isprintable() or any(map(str.isspace, text)):
        raise problem("bad-value", "must be one word without blanks", help="remove the key or write its value")
    return text


IpAddress = Annotated[Text, AfterValidator(_ip_address)]
Serial = Annotated[Text, AfterValidator(_serial)]
Serials = tuple[Serial, ...]
Port = Annotated[Int, AfterValidator(_port)]
NodeRank = Annotated[Int, Field(ge=0)]
# Where something is reached: a device file, a URL, a host.
Connection = Annotated[Text, AfterValidator(_word)]
CameraType = Literal["realsense", "zed"]
GripperType = Literal["franka", "robotiq"]
