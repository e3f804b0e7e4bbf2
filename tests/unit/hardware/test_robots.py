"""Robots by type: ours, and those that a user's package brings."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from rlinf_core.errors import ConfigError
from rlinf_core.hardware.robots import registry
from rlinf_core.hardware.robots.franka import ROBOT_PORT, Franka
from rlinf_core.hardware.robots.registry import hardware_model, hardware_types, register_hardware
from rlinf_core.hardware.robots.unit import RobotUnit
from rlinf_core.scalars import Float, YamlInt

ARM: dict[str, Any] = {"node_rank": 16, "robot_ip": "10.10.10.1"}


class Gantry(RobotUnit):
    """A robot as a user's package would bring it."""

    exclusive: ClassVar[tuple[str, ...]] = ("bus",)
    bus: str
    reach: Float = 1.0


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make installed packages offer hardware types by name and `module:object`."""

    def make(**offered: str) -> None:
        points = EntryPoints(EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in offered.items())
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda **wanted: points.select(**wanted))

    return make


def test_a_franka_keeps_serials_and_address_as_written() -> None:
    arm = Franka.model_validate({**ARM, "camera_serials": [YamlInt(322142001230, "0322142001230")]})
    assert arm.camera_serials == ("0322142001230",)
    assert (arm.robot_ip, arm.node_rank) == ("10.10.10.1", 16)
    assert (arm.camera_type, arm.gripper_type, arm.disable_validate) == ("realsense", "franka", False)


def test_an_arm_says_where_it_must_answer() -> None:
    assert Franka.model_validate(ARM).addresses() == (("10.10.10.1", ROBOT_PORT),)
    assert Franka.model_validate({**ARM, "robot_port": 5000}).addresses() == (("10.10.10.1", 5000),)
    assert Franka.model_validate({**ARM, "disable_validate": True}).addresses() == ()
    assert Gantry(node_rank=0, bus="can0").addresses() == ()


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        ({"robot_ip": "10.10.10"}, "bad-value", "robot_ip"),
        ({"robot_ip": "arm.local"}, "bad-value", "robot_ip"),
        ({"robot_port": 0}, "bad-value", "robot_port"),
        ({"robot_port": 65536}, "bad-value", "robot_port"),
        ({"camera_type": "webcam"}, "literal_error", "camera_type"),
        ({"camera_serials": "322142001230"}, "tuple_type", "camera_serials"),
        ({"node_rank": -1}, "greater_than_equal", "node_rank"),
        ({"disable_validate": "yes"}, "wrong-type", "disable_validate"),
        ({"robot_pi": "10.10.10.1"}, "extra_forbidden", "robot_pi"),
    ],
)
def test_what_a_franka_refuses(change: dict[str, Any], code: str, where: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Franka.model_validate({**ARM, **change})
    assert [(error["type"], error["loc"]) for error in caught.value.errors()] == [(code, (where,))]


def test_an_ipv6_address_is_an_address() -> None:
    assert Franka.model_validate({**ARM, "robot_ip": "fe80::1"}).robot_ip == "fe80::1"


def test_types_are_found_by_their_exact_name() -> None:
    assert hardware_model("Franka") is Franka
    with pytest.raises(PydanticCustomError) as caught:
        hardware_model("franka")
    assert caught.value.type == "unknown-hardware-type"
    assert caught.value.context is not None
    assert caught.value.context["help"] == "did you mean `Franka`? known types: `Franka`"


def test_a_robot_of_ones_own_is_registered_by_decorator() -> None:
    register_hardware("Gantry")(Gantry)
    assert hardware_model("Gantry") is Gantry
    assert hardware_types() == ["Franka", "Gantry"]


def test_one_name_has_one_model() -> None:
    register_hardware("Gantry")(Gantry)
    register_hardware("Gantry")(Gantry)  # a module that is imported again
    with pytest.raises(ConfigError, match="registered twice"):
        register_hardware("Gantry")(Franka)


def test_a_package_offers_a_robot_by_entry_point(offer: Any) -> None:
    offer(Gantry=f"{__name__}:Gantry")
    assert "Gantry" not in registry._registered
    assert hardware_types() == ["Franka", "Gantry"]
    assert hardware_model("Gantry").__name__ == "Gantry"


@pytest.mark.parametrize("value", ["no_such_module:Robot", "json:dumps"])
def test_a_package_that_cannot_deliver_is_named(offer: Any, value: str) -> None:
    offer(Gantry=value)
    with pytest.raises(PydanticCustomError) as caught:
        hardware_model("Gantry")
    assert caught.value.type == "unknown-hardware-type"
    assert value in caught.value.message()


def test_a_file_without_robots_imports_none() -> None:
    code = (
        "import sys, rlinf_core.config.cluster as c; c.ClusterConfig.model_validate({'num_nodes': 1});"
        "print([m for m in ('rlinf_core.hardware.robots.franka', 'ray', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
