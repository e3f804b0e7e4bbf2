from __future__ import annotations

import pickle

import pytest

from rlinf_core import errors, failures
from rlinf_core.channel import operation
from rlinf_core.channel.operation import ChannelEmpty, ChannelFull
from rlinf_core.errors import RLinfError, RuntimeFailure

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
