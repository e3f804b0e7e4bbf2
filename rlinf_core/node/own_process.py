"""Repairs or refusals of environments in which Python, torch or Ray fail.

One is a uid without an entry in the password database, as under `docker run --user 54321` and at some sites.
"""

from __future__ import annotations

import os
import pwd

from rlinf_core.errors import ClusterError, RLinfError

_OPTIMIZE = "PYTHONOPTIMIZE"
# The variables in which `getpass.getuser` looks for a name.
_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")


def name_user() -> str | None:
    """Give a user without a name a login name and, if HOME is unset, a home folder: without them Python, torch and Ray
    raise errors. Processes that this one starts inherit both.

    Returns:
        The home folder if it was set now, else None.

    Raises:
        RLinfError: the folder is not private to this user.
    """
    number = os.getuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        if not any(map(os.environ.get, _NAMES)):
            os.environ["LOGNAME"] = f"uid-{number}"
        if not os.environ.get("HOME"):
            # Imported here: nearly every user has a name.
            from rlinf_core.node.node_facts import make_private, private_base

            home = os.path.join(private_base(), "home")
            if not (make_private(private_base()) and make_private(home)):
                raise RLinfError(
                    f"HOME is not set, user {number} has no name, and `{home}` is not a private folder of its own",
                    help="set HOME to a folder of yours",
                ) from None
            os.environ["HOME"] = home
            return home
    return None


def refuse_stripped_docstrings() -> None:
    """Refuse to start Ray if the environment strips docstrings, which Ray's agents need.

    Raises:
        ClusterError: `PYTHONOPTIMIZE` is 2 or more.
    """
    level = os.environ.get(_OPTIMIZE, "")
    # A value that is not a number counts as 1 for Python.
    if level.isdecimal() and int(level[:6]) >= 2:
        raise ClusterError(
            f"Ray does not start with {_OPTIMIZE}={level[:6]}",
            why="it strips docstrings, and Ray's agents add to theirs",
            help=f"unset {_OPTIMIZE}",
        )
