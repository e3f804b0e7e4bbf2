"""All exit codes of `rlinf`."""

from __future__ import annotations

from enum import IntEnum

from rlinf_core.errors import ClusterError, ConfigError, PlacementError, RLinfError


class ExitCode(IntEnum):
    """The exit status that the shell sees."""

    OK = 0
    """Done; warnings do not change that."""
    FAILED = 1
    """The job or the operation failed, or rlinf itself has a bug."""
    INVALID = 2
    """Wrong usage, or a file that is invalid, missing or unreadable."""
    UNREACHABLE = 3
    """The cluster is not reachable or not whole."""
    HUNG_UP = 129
    """SIGHUP: the terminal was closed."""
    INTERRUPTED = 130
    """Ctrl-C."""
    USER_SIGNAL_1 = 138
    """SIGUSR1, as schedulers send before a job's time is over."""
    USER_SIGNAL_2 = 140
    """SIGUSR2, likewise."""
    TERMINATED = 143
    """SIGTERM."""
    CPU_LIMIT = 152
    """SIGXCPU: the limit of processor time is near."""


# The first matching class decides.
_BY_ERROR: tuple[tuple[type[RLinfError], ExitCode], ...] = (
    (ConfigError, ExitCode.INVALID),
    (PlacementError, ExitCode.INVALID),
    (ClusterError, ExitCode.UNREACHABLE),
)


def code_of(error: RLinfError) -> ExitCode:
    """Return the exit code of a command that ends with `error`."""
    return next((code for class_, code in _BY_ERROR if isinstance(error, class_)), ExitCode.FAILED)
