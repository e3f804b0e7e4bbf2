"""Errors of the runtime: words, places, causes, and how they travel."""

from __future__ import annotations

import pickle
import sys
import threading
import types
from typing import Any

import pytest

from rlinf_core import errors, failures
from rlinf_core.channel import operation
from rlinf_core.channel.operation import ChannelEmpty, ChannelFull
from rlinf_core.errors import (
    ChannelClosed,
    CommunicationTimeoutError,
    DeadlockError,
    RemoteError,
    RLinfError,
    RuntimeFailure,
    WorkerDiedError,
)
from rlinf_core.failures import PackedError, WorkerGroupError, followed, raise_unseen


class TwoArgumentsError(Exception):
    """The usual trap of exceptions with their own constructor: Python pickles them and cannot rebuild them."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def _fail() -> None:
    raise RuntimeError


class StubbornError(Exception):
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _fail, ()


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def travel(error: BaseException, where: str | None = "actor:1") -> Exception:
    packed = PackedError.of(error, where)
    return pickle.loads(pickle.dumps(packed)).unpack()


def test_an_exception_arrives_as_itself_with_its_place() -> None:
    error = travel(raised(KeyError("x")))
    assert isinstance(error, KeyError)
    assert error.args == ("x",)
    [note] = error.__notes__
    assert note.startswith("raised in actor:1:\nTraceback")
    assert "in raised" in note


def test_notes_of_an_exception_are_told_once() -> None:
    source = ValueError("x")
    source.add_note("while counting")
    assert "".join(travel(raised(source)).__notes__).count("while counting") == 1


def test_fields_of_our_own_errors_arrive() -> None:
    error = travel(WorkerDiedError("actor:1", cause="killed"))
    assert isinstance(error, WorkerDiedError)
    assert (error.address, error.cause) == ("actor:1", "killed")
    assert not hasattr(error, "__notes__")


def test_an_exception_with_its_own_constructor_arrives_as_itself() -> None:
    error = travel(raised(ValueError(TwoArgumentsError(3, "three"))))
    [inner] = error.args
    assert isinstance(inner, TwoArgumentsError)
    assert (inner.code, str(inner)) == (3, "three")


@pytest.mark.parametrize(
    "source",
    [
        FileNotFoundError(2, "No such file", "x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ImportError("no", name="x"),
        ExceptionGroup("g", [ValueError(1), TwoArgumentsError(1, "x")]),
        AttributeError("no", name="x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_of_python_arrive_whole(source: Exception) -> None:
    error = travel(source)
    assert type(error) is type(source)
    assert str(error) == str(source)
    assert repr(error) == repr(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (StubbornError("three"), "three"),
        (ValueError(threading.Lock()), "<unlocked"),
        (SystemExit(4), "4"),
        (KeyboardInterrupt(), ""),
        (MuteError(threading.Lock()), "cannot be shown"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_rebuilt_becomes_a_remote_error(source: BaseException, text: str) -> None:
    error = travel(raised(source))
    assert isinstance(error, RemoteError)
    assert error.type_name.endswith(type(source).__name__)
    assert text in error.text
    assert error.where == "actor:1"
    assert error.traceback is not None
    assert "in raised" in error.traceback


def test_a_type_that_does_not_exist_here_becomes_a_remote_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("of_the_other_side")
    kind = type("TheirError", (Exception,), {"__module__": module.__name__})
    module.TheirError = kind  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    packed = PackedError.of(kind("boom"), "actor:1")
    monkeypatch.delitem(sys.modules, module.__name__)
    error = packed.unpack()
    assert isinstance(error, RemoteError)
    assert str(error) == "actor:1: of_the_other_side.TheirError: boom"


def group_error(**failures: Exception) -> WorkerGroupError:
    return WorkerGroupError("actor", "train", {int(rank[1:]): error for rank, error in failures.items()}, 8)


def type_of_the_script() -> type[Exception]:
    """As a worker has it that was sent a class of the main script: a copy, of which its own script knows nothing."""

    def build(self: Any, joint: int) -> None:
        Exception.__init__(self, f"joint {joint}")
        self.joint = joint

    return type("JointError", (Exception,), {"__module__": "__main__", "__init__": build})


def test_a_type_of_the_main_script_is_that_of_who_has_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pickle.dumps(PackedError.of(raised(type_of_the_script()(4)), "arm:0"))
    own = type_of_the_script()
    monkeypatch.setattr(sys.modules["__main__"], "JointError", own, raising=False)
    error: Any = pickle.loads(packed).unpack()
    assert type(error) is own
    assert (error.joint, str(error)) == (4, "joint 4")
    monkeypatch.setattr(sys.modules["__main__"], "JointError", lambda joint: joint)
    assert isinstance(pickle.loads(packed).unpack(), RemoteError)
    monkeypatch.delattr(sys.modules["__main__"], "JointError")
    elsewhere = pickle.loads(packed).unpack()
    assert isinstance(elsewhere, RemoteError)
    assert "JointError" in str(elsewhere)


def test_except_star_sees_the_original_exceptions() -> None:
    parts: list[ExceptionGroup[Exception]] = []
    try:
        raise group_error(r1=ValueError("one"), r2=KeyError("two"), r3=ValueError("three"))
    except* ValueError as part:
        parts.append(part)
    except* KeyError as part:
        parts.append(part)
    values, keys = parts
    assert isinstance(values, WorkerGroupError)
    assert isinstance(keys, WorkerGroupError)
    assert [str(error) for error in values.exceptions] == ["one", "three"]
    assert values.ranks == (1, 3)
    assert keys.by_rank.keys() == {2}


def test_part_of_a_failed_rank_keeps_its_rank() -> None:
    inner = ExceptionGroup("inner", [ValueError("a"), KeyError("b")])
    whole = group_error(r0=TypeError(), r5=inner)
    whole.places = {0: "node 0 (10.0.0.1), pid 7", 5: "node 1 (10.0.0.2), pid 8"}
    part = whole.subgroup(KeyError)
    assert isinstance(part, WorkerGroupError)
    assert part.ranks == (5,)
    assert isinstance(part.by_rank[5], ExceptionGroup)
    assert part.places == {5: "node 1 (10.0.0.2), pid 8"}


def test_it_is_one_of_our_errors_and_says_what_failed() -> None:
    error = group_error(r2=ValueError("bad batch"), r0=ValueError("worse"))
    assert isinstance(error, RLinfError)
    assert str(error) == "2 of 8 workers of `actor` failed in `train`, first rank 0: ValueError: worse"
    assert (error.group, error.method, error.world_size) == ("actor", "train", 8)


def test_root_causes_stand_first() -> None:
    error = group_error(
        r0=WorkerDiedError("actor:3"),
        r1=CommunicationTimeoutError("recv from actor:2", 5),
        r2=ValueError("the root"),
        r3=WorkerDiedError("actor:3", cause="killed by the kernel"),
        r4=ChannelClosed("data", "closed"),
    )
    assert error.ranks == (2, 3, 0, 1, 4)
    assert list(error.by_rank) == [0, 1, 2, 3, 4]
    assert "first rank 2: ValueError: the root" in str(error)


def test_it_pickles_whatever_it_holds() -> None:
    error = group_error(r1=StubbornError("x"), r0=ChannelClosed("data", "closed"), r2=ValueError(threading.Lock()))
    error.add_note("in step 7")
    error.places = {1: "node 0 (10.0.0.1), pid 7"}
    twin = pickle.loads(pickle.dumps(error))
    assert isinstance(twin, WorkerGroupError)
    assert (twin.group, twin.method, twin.world_size, twin.ranks) == ("actor", "train", 8, (1, 2, 0))
    assert [type(one) for one in twin.exceptions] == [RemoteError, RemoteError, ChannelClosed]
    assert twin.__notes__ == ["in step 7"]
    assert twin.places == {1: "node 0 (10.0.0.1), pid 7"}


def test_it_can_be_raised_from_a_cause_and_shown() -> None:
    import traceback

    shown = "".join(traceback.format_exception(raised(group_error(r1=ValueError("bad")))))
    assert "ValueError: bad" in shown


def test_a_failure_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one worker's failure"):
        group_error()


def failed(error: Exception, group: str = "actor") -> WorkerGroupError:
    return WorkerGroupError(group, "run", {0: error}, 1)


def test_of_several_unseen_failures_the_first_cause_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    stuck, cause, other = (
        failed(DeadlockError(("env:0",), "picture"), "env"),
        failed(ValueError("x")),
        failed(KeyError()),
    )
    with pytest.raises(WorkerGroupError) as caught:
        raise_unseen([stuck, cause, other])
    assert caught.value is cause
    assert [record.message for record in caplog.records] == [
        f"another call failed, and its result was never read: {item.message}" for item in (other, stuck)
    ]
    raise_unseen([])


def test_an_error_under_way_is_told_what_it_followed_from(caplog: pytest.LogCaptureFixture) -> None:
    cause, error = failed(ValueError("x")), DeadlockError(("driver",), "picture")
    raise_unseen([cause], instead_of=error)
    assert error.__cause__ is cause
    assert error.__notes__ == ["followed from the failure of `actor:0` in `run`"]
    assert not caplog.records

    own = KeyError("its own")
    raise_unseen([cause], instead_of=own)
    assert own.__cause__ is None
    assert "first rank 0: ValueError: x" in caplog.text


def test_consequence_of_ended_workers_is_no_cause_of_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = failed(WorkerDiedError("env:0"), "rollout")
    ended_since, alone = failed(WorkerDiedError("rollout:0")), failed(WorkerDiedError("env:0"), "env")
    raise_unseen([ended_since], instead_of=error)
    assert error.__cause__ is None
    raise_unseen([ended_since, alone], instead_of=error)
    assert error.__cause__ is alone
    assert not caplog.records


def test_death_of_what_all_depend_on_follows_from_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    """Its workers fail of files that the end of the run removes, and of each other."""
    died = WorkerDiedError("gcs_server", node="this machine")
    raise_unseen([WorkerGroupError("actor", "save", {0: OSError("no such file")}, 1)], instead_of=died)
    assert died.__cause__ is None
    assert "another call failed" in caplog.text
    caplog.clear()
    raise_unseen([WorkerGroupError("env", "step", {0: WorkerDiedError("actor:0")}, 1)], instead_of=died)
    assert (died.__cause__, caplog.text) == (None, "")


def test_death_after_a_reported_failure_is_not_reported_again(caplog: pytest.LogCaptureFixture) -> None:
    cause = failed(WorkerDiedError("env:0", cause="signal 11"), "env")
    waited = failed(WorkerDiedError("env:0", cause="its group was shut down"), "rollout")
    raise_unseen([waited], instead_of=cause)
    assert not caplog.records
    raise_unseen([failed(WorkerDiedError("env:1"), "rollout")], instead_of=cause)
    assert "`env:1` died" in caplog.text


def test_what_followed_is_told_from_what_failed_by_itself() -> None:
    assert followed(DeadlockError(("driver",), "picture"))
    assert followed(failed(WorkerDiedError("env:0")))
    assert not followed(failed(WorkerDiedError("actor:0")))
    assert not followed(ValueError())


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (ValueError("no camera\nat all"), "ValueError: no camera"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("x" * 300), f"ValueError: {'x' * 200}..."),
        (pickle.PicklingError("no"), "_pickle.PicklingError: no"),
    ],
)
def test_a_packed_error_in_a_line(error: BaseException, summary: str) -> None:
    assert PackedError.of(error).summary == summary


EXAMPLES: list[RLinfError] = [
    errors.InvalidNameError("bad", help="h"),
    errors.EnvironmentVariableError("RLINF_TIMEOUT", "soon", expected="seconds"),
    errors.UnknownGroupError("actr", ("actor", "env"), where="env:0"),
    errors.PeerNotFoundError("actor:9", "`actor` has 4 ranks"),
    errors.WorkerDiedError("actor:1", node="node 1 (10.0.0.2)", cause="killed by the kernel", where="env:3"),
    errors.CommunicationTimeoutError("recv from actor:0", 30.0, where="env:3", picture="p"),
    errors.DeadlockError(("a:0", "b:0"), "picture", where="a:0"),
    errors.ChannelError("data", "m"),
    errors.ChannelClosed("data", "m", key="k", help="h"),
    ChannelFull("data", "m", key="k"),
    ChannelEmpty("data", "m", key="k"),
    errors.PayloadError("m", where="obj.x"),
    errors.MismatchError("float32[4]", "float32[5]", where="actor:0"),
    errors.AuthenticationError("m"),
    errors.CancelledOperationError("m"),
    errors.RemoteError("pkg.Error", "boom", traceback="Traceback ..."),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_it_travels_with_its_fields(error: RLinfError) -> None:
    error.add_note("seen by a test")
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert vars(twin) == vars(error)
    assert str(twin) == str(error)
    assert twin.__notes__ == ["seen by a test"]


def test_every_runtime_error_has_an_example() -> None:
    tree = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RuntimeFailure)}
    assert tree - {RuntimeFailure} <= {type(error) for error in EXAMPLES}


def test_they_are_also_what_python_calls_them() -> None:
    assert issubclass(errors.CommunicationTimeoutError, TimeoutError)
    assert issubclass(errors.UnknownGroupError, LookupError)
    assert issubclass(errors.MismatchError, ValueError)
    with pytest.raises(TimeoutError):
        raise errors.CommunicationTimeoutError("get", 1)


def test_a_wrong_group_name_gets_a_near_one() -> None:
    error = errors.UnknownGroupError("actr", ("env", "actor"))
    assert (
        str(error)
        == "no group is named `actr`\n  why: groups of this job: `actor`, `env`\n  help: did you mean `actor`?"
    )
    assert "groups of this job: none" in str(errors.UnknownGroupError("actr", ()))


def test_an_unknown_cause_of_death_is_said() -> None:
    assert "killed, or exited without an exception" in str(errors.WorkerDiedError("actor:1"))


def test_a_timeout_says_operation_seconds_and_picture() -> None:
    error = errors.CommunicationTimeoutError("recv from actor:0", 30.0, where="env:3", picture="env:3 waits")
    assert str(error) == "env:3: `recv from actor:0` did not finish in 30 s\n  why: env:3 waits"


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    """Every error stands below its base, indented by two."""
    result: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        name = line.split()[0] if line.startswith("    ") and line.strip() else ""
        if name:
            result.append(((len(line) - len(line.lstrip()) - 4) // 2, name))
    bases: list[type] = []
    for depth, name in result:
        (kind,) = {getattr(module, name) for module in (errors, failures, operation) if hasattr(module, name)}
        assert depth == 0 or issubclass(kind, bases[depth - 1]), name
        bases[depth:] = [kind]
    defined = {name for name, var in vars(errors).items() if isinstance(var, type) and issubclass(var, Exception)}
    assert defined <= {name for _, name in result}
