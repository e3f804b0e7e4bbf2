"""Which classes make groups; what groups do is tested on a real Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.errors import InvalidNameError
from rlinf_core.worker.group.launch import base_address
from rlinf_core.worker.worker import Worker


@pytest.mark.parametrize("name", ["send", "recv", "log_info", "timer", "worker_info", "torch_device", "broadcast"])
def test_a_method_named_like_one_of_every_worker_is_refused(name: str) -> None:
    def method(self: Worker, value: int) -> int:
        return value

    clash = type("Clash", (Worker,), {name: method})
    derived = type("Derived", (clash,), {})
    for item in (clash, derived):
        with pytest.raises(InvalidNameError, match=f"`Clash.{name}` cannot be called on a group") as caught:
            item.create_group()
        assert caught.value.why == f"it would replace the `{name}` of every worker"


def test_a_mixin_cannot_replace_what_workers_have() -> None:
    class Mixin:
        def send(self, value: int) -> None: ...

    class Clash(Mixin, Worker):  # pyright: ignore[reportIncompatibleMethodOverride] - that is the clash
        pass

    with pytest.raises(InvalidNameError, match=r"Mixin\.send"):
        Clash.create_group()


def test_group_that_was_not_launched_says_so() -> None:
    assert repr(Worker.create_group()) == "<WorkerGroup of Worker, not running>"


def test_class_may_choose_its_groups_and_device() -> None:
    class Own(Worker):
        torch_device: Any = "cpu"

        @classmethod
        def create_group(cls, *args: Any, **kwargs: Any) -> Any:
            return super().create_group(*args, size=3, **kwargs)

        def learn(self) -> None: ...

    assert Own.create_group().world_size == 0


class Learner(Worker):
    def learn(self) -> None: ...


def test_a_group_lists_the_methods_that_can_be_called_on_it() -> None:
    group = Learner.create_group()
    assert {"learn", "launch", "execute_on", "world_size"} <= set(dir(group))
    assert "send" not in dir(group), "a group does not send; its workers do"
    assert group.methods == {"learn"}


@pytest.mark.parametrize(
    ("config", "section", "name"),
    [
        ({"actor": {"group_name": "Learners"}}, "actor", "Learners"),
        (SimpleNamespace(actor=SimpleNamespace(group_name="Learners")), "actor", "Learners"),
        ({"actor": {}}, "actor", "Worker_group_Mine"),
        ({"actor": {"group_name": "Learners"}}, "rollout", "Worker_group_Mine"),
        ({"actor": {"group_name": "Learners"}}, None, "Worker_group_Mine"),
    ],
)
def test_a_group_takes_its_name_from_the_section_that_is_its_own(config: Any, section: str | None, name: str) -> None:
    class Mine(Worker):
        config_section = section

    for arguments in (((config,), {}), ((3,), {"cfg": config})):
        assert str(base_address(Mine, arguments, None)) == name
        assert str(base_address(Mine, arguments, "given")) == "given"
