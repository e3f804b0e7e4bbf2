"""Robots by type: ours, and those that a user's package brings."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, ClassVar, Self

import pytest
from pydantic import ValidationError, model_validator
from pydantic_core import PydanticCustomError

from rlinf_core.errors import ConfigError
from rlinf_core.hardware import robots as units
from rlinf_core.hardware.franka import ROBOT_PORT, Franka
from rlinf_core.hardware.robots import RobotUnit, hardware_model, hardware_types, register_hardware
from rlinf_core.process.import_path import EntryPoint
from rlinf_core.scalars import Float, YamlInt

OURS = ["DOSW1", "DualFranka", "Franka", "GimArm", "Robot", "SO-101", "Turtle2"]
ARM: dict[str, Any] = {"node_rank": 16, "robot_ip": "10.10.10.1"}


class Gantry(RobotUnit):
    """A robot as a user's package would bring it."""

    exclusive: ClassVar[tuple[str, ...]] = ("bus",)
    bus: str
    reach: Float = 1.0


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_registered", dict(units._registered))


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make installed packages offer hardware types by name and `module:object`."""

    def make(**offered: str) -> None:
        points = {name: EntryPoint(name, value) for name, value in offered.items()}
        monkeypatch.setattr(units, "offered", lambda group: points if group == units.ENTRY_POINT_GROUP else {})

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
        ({"robot_ip": "0.0.0.0"}, "bad-value", "robot_ip"),
        ({"robot_ip": "0.0.0.7"}, "bad-value", "robot_ip"),
        ({"robot_ip": "::"}, "bad-value", "robot_ip"),
        ({"robot_ip": "255.255.255.255"}, "bad-value", "robot_ip"),
        ({"robot_ip": "224.0.0.1"}, "bad-value", "robot_ip"),
        ({"gripper_connection": "/dev/tty USB0"}, "bad-value", "gripper_connection"),
        ({"gripper_connection": ""}, "bad-value", "gripper_connection"),
        ({"controller_node_rank": -1}, "greater_than_equal", "controller_node_rank"),
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


def test_two_arms_are_one_robot_with_the_cameras_of_three_places() -> None:
    arms = {"node_rank": 0, "left_robot_ip": "10.0.0.1", "right_robot_ip": "10.0.0.2", "robot_port": 5000}
    cameras = {"left_camera_serials": ["1"], "base_camera_serials": ["2", "3"], "base_camera_type": "zed"}
    robot = hardware_model("DualFranka").model_validate({**arms, **cameras})
    assert robot.addresses() == (("10.0.0.1", 5000), ("10.0.0.2", 5000))
    assert robot.cameras() == (("realsense", "1"), ("zed", "2"), ("zed", "3"))
    quiet = hardware_model("DualFranka").model_validate({**arms, **cameras, "disable_validate": True})
    assert (quiet.addresses(), quiet.cameras()) == ((), ())


@pytest.mark.parametrize("name", OURS)
def test_robots_of_every_type_are_checked(name: str) -> None:
    fields = hardware_model(name).model_fields
    addresses = {field: "10.0.0.1" for field in fields if field.endswith("_ip") or field == "address"}
    addresses |= {"device": "/dev/ttyACM0"} if "device" in fields else {}
    addresses |= {"driver": "my_lab.arm:Driver"} if "driver" in fields else {}
    with pytest.raises(ValidationError) as caught:
        hardware_model(name).model_validate({"node_rank": 0, **addresses, "camera_tpye": "zed"})
    assert [(error["type"], error["loc"]) for error in caught.value.errors()] == [("extra_forbidden", ("camera_tpye",))]


@pytest.mark.parametrize("name", ["DOSW1", "Turtle2", "GimArm"])
def test_a_controller_of_the_users_gets_its_options(name: str) -> None:
    robot = hardware_model(name).model_validate({"node_rank": 0, "camera_serials": ["7"], "options": {"bus": "can0"}})
    assert robot.model_dump()["options"] == {"bus": "can0"}
    assert robot.cameras() == (("realsense", "7"),)


def test_ports_of_a_two_arm_robot_are_numbers_of_ports() -> None:
    described = {"node_rank": 0, "left_arm_port": 50051, "right_lead_port": 50052}
    robot = hardware_model("DOSW1").model_validate(described)
    assert (robot.model_dump()["left_arm_port"], robot.model_dump()["left_lead_port"]) == (50051, None)
    with pytest.raises(ValidationError, match="is not a TCP port"):
        hardware_model("DOSW1").model_validate({**described, "left_arm_port": 0})


@pytest.mark.parametrize(
    ("address", "answers"),
    [
        ("cell-3:9000", (("cell-3", 9000),)),
        ("[fe80::1]:9000", (("fe80::1", 9000),)),
        ("cell-3", ()),
        ("/dev/ttyUSB0", ()),
        ("ws://cell-3:9000", ()),
        ("cell-3:70000", ()),
    ],
)
def test_any_robot_may_say_where_it_answers(address: str, answers: object) -> None:
    described = {"node_rank": 0, "address": address, "driver": "my_lab.cell:Driver"}
    model = hardware_model("Robot")
    assert model.model_validate(described).addresses() == answers
    assert model.model_validate({**described, "disable_validate": True}).addresses() == ()


@pytest.mark.parametrize(
    ("name", "change", "where"),
    [
        ("Robot", {"driver": None}, "driver"),
        ("Robot", {"driver": "my_lab.cell"}, "driver"),
        ("Robot", {"driver": "my lab:Cell"}, "driver"),
        ("Robot", {"address": ""}, "address"),
        ("SO-101", {"device": "ttyACM0"}, "device"),
        ("SO-101", {"driver": ":Arm"}, "driver"),
    ],
)
def test_what_robots_with_a_driver_refuse(name: str, change: dict[str, Any], where: str) -> None:
    own = {"address": "cell-3"} if name == "Robot" else {"device": "/dev/ttyACM0"}
    described = {"node_rank": 0, "driver": "my_lab.cell:Driver", **own}
    hardware_model(name).model_validate(described)
    with pytest.raises(ValidationError) as caught:
        hardware_model(name).model_validate({**described, **change})
    assert [error["loc"] for error in caught.value.errors()] == [(where,)]


def test_an_address_may_be_a_variable_of_the_node() -> None:
    arm = Franka.model_validate({**ARM, "robot_ip": "$ARM_IP", "camera_serials": ["1"]})
    result = arm.on_node({"ARM_IP": "10.0.0.7"})
    assert (result.robot_ip, result.camera_serials, result.node_rank) == ("10.0.0.7", ("1",), 16)
    assert arm.robot_ip == "$ARM_IP"
    plain = Franka.model_validate(ARM)
    assert plain.on_node({}) is plain


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "`robot_ip: $ARM_IP` of node 16: the variable `ARM_IP` is not set there"),
        ({"ARM_IP": ""}, "the variable `ARM_IP` is not set there"),
        ({"ARM_IP": "$OTHER"}, "the variable `ARM_IP` refers to another variable there"),
        ({"ARM_IP": "10.0.0"}, "the variable `ARM_IP` is wrong: "),
    ],
)
def test_a_variable_that_gives_no_address_is_named_with_its_node(environ: dict[str, str], message: str) -> None:
    arm = Franka.model_validate({**ARM, "robot_ip": "$ARM_IP"})
    with pytest.raises(ConfigError) as caught:
        arm.on_node(environ)
    assert message in str(caught.value)
    assert "env_vars" in (caught.value.help or "")


class Fenced(Franka):
    """A robot with a rule about the whole unit."""

    @model_validator(mode="after")
    def _inside(self) -> Self:
        if self.robot_ip == "10.0.0.9":
            raise ValueError("outside of the cell")
        return self


def test_a_rule_about_a_unit_names_its_variable() -> None:
    with pytest.raises(ConfigError, match=r"the variable `ARM_IP` is wrong: .*outside of the cell"):
        Fenced.model_validate({**ARM, "robot_ip": "$ARM_IP"}).on_node({"ARM_IP": "10.0.0.9"})


def test_null_is_the_default_of_a_key_that_has_one() -> None:
    arm = Franka.model_validate({**ARM, "robot_port": None, "camera_serials": None, "gripper_connection": None})
    assert (arm.robot_port, arm.camera_serials, arm.gripper_connection) == (ROBOT_PORT, (), None)
    with pytest.raises(ValidationError):
        Franka.model_validate({**ARM, "robot_ip": None})


def test_an_ipv6_address_is_an_address() -> None:
    assert Franka.model_validate({**ARM, "robot_ip": "fe80::1"}).robot_ip == "fe80::1"


def test_types_are_found_by_their_exact_name() -> None:
    assert hardware_model("Franka") is Franka
    with pytest.raises(PydanticCustomError) as caught:
        hardware_model("franka")
    assert caught.value.type == "unknown-hardware-type"
    assert caught.value.context is not None
    assert (
        caught.value.context["help"]
        == "did you mean `Franka`? known types: `DOSW1`, `DualFranka`, `Franka`, `GimArm`, `Robot`, `SO-101`, `Turtle2`"
    )


def test_a_robot_of_ones_own_is_registered_by_decorator() -> None:
    register_hardware("Gantry")(Gantry)
    assert hardware_model("Gantry") is Gantry
    assert hardware_types() == sorted([*OURS, "Gantry"])


def test_one_name_has_one_model() -> None:
    register_hardware("Gantry")(Gantry)
    register_hardware("Gantry")(Gantry)  # a module that is imported again
    with pytest.raises(ConfigError, match="registered twice"):
        register_hardware("Gantry")(Franka)
    with pytest.raises(ConfigError, match="is no hardware type"):
        register_hardware(Gantry)  # pyright: ignore[reportArgumentType] - a decorator without brackets


def test_a_package_offers_a_robot_by_entry_point(offer: Any) -> None:
    offer(Gantry=f"{__name__}:Gantry")
    assert "Gantry" not in units._registered
    assert hardware_types() == sorted([*OURS, "Gantry"])
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
        "import sys, rlinf_core.config.sections.cluster as c; c.ClusterConfig.model_validate({'num_nodes': 1});"
        "print([m for m in ('rlinf_core.hardware.franka', 'ray', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
