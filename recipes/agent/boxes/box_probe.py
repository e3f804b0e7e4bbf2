"""A test of boxes for `rlinf doctor`, run where agents would run.

    python -m recipes.agent.boxes.box_probe

Its last output line is a JSON record.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from pathlib import Path

from recipes.agent.boxes.box import BoxError
from recipes.agent.boxes.boxes import MIB, BoxHost, BoxLimits
from rlinf_core import ConfigError

_HELP = {
    "unshare": "run `sysctl -w user.max_user_namespaces=65536 kernel.unprivileged_userns_clone=1`; on Ubuntu also"
    " `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`",
    "overlay": "boxes need Linux 5.11 or newer, and a folder on a disk: neither a network file system nor the root of"
    " a container; name one by `agent.environment.options.box_folder`",
    "proc": "a container must see all of /proc: start it with `--security-opt systempaths=unconfined`",
}
_IDS = {
    "written": "users of boxes are numbers that nobody has",
    "lent": "users of boxes are those that /etc/subuid lends",
    "single": "a box has no user but root: `apt install uidmap` and a row of this user in /etc/subuid and /etc/subgid"
    " lend it more",
}


async def _trial(folder: Path) -> BoxHost:
    boxes = BoxHost(folder, 1024)
    try:
        (folder / "layers/empty").mkdir()
        async with boxes.box([folder / "layers/empty"], BoxLimits(memory=64 * MIB)) as box:
            await box.finish()
    finally:
        await boxes.close()
    return boxes


def look() -> dict[str, str]:
    """Return the result of starting an empty box, for `rlinf doctor`: `verdict`, `what` and `help`."""
    try:
        with tempfile.TemporaryDirectory(dir=_place()) as folder:
            boxes = asyncio.run(_trial(Path(folder)))
    except (BoxError, OSError) as error:
        help = next((text for word, text in _HELP.items() if word in str(error)), "")
        return {"verdict": "fault", "what": f"boxes cannot be made: {error}", "help": help}
    except ConfigError as error:
        return {"verdict": "fault", "what": error.message, "help": error.help or ""}
    bounded = "a control group bounds" if boxes.bounds_memory else "no control group is delegated: a box looks at"
    what = f"boxes can be made; {bounded} the memory of a box's processes together; {_IDS[boxes.ids['how']]}"
    return {"verdict": "ok", "what": what, "help": ""}


def _place() -> str | None:
    """Return a folder on the file system of the user's boxes; None: the folder of temporary files."""
    home = Path.home()
    with contextlib.suppress(OSError):
        (home / ".rlinf").mkdir(exist_ok=True)
        return str(home / ".rlinf")
    return None


if __name__ == "__main__":
    print(json.dumps(look()))
