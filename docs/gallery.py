"""Make the runs of docs/results.md and put their reports where `make docs` finds them: `make gallery`.

python -m docs.gallery [NAME ...]
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

DOCS: Final = Path(__file__).parent
# Not in git, and not in the folder of the site, which every build empties.
MADE: Final = DOCS.parent / "build/gallery"
_ENTRY = re.compile(r"^### (?P<title>.+?) \{#(?P<name>[a-z]+)\}\n.*?^\$ rlinf (?P<arguments>.*?)\n", re.M | re.S)


class Entry(NamedTuple):
    """One run of the gallery: the anchor of its section, its title, and the arguments of `rlinf`."""

    name: str
    title: str
    arguments: list[str]


def entries() -> list[Entry]:
    """Return the runs that the page shows, in its order."""
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    return [Entry(match["name"], match["title"], shlex.split(match["arguments"])) for match in _ENTRY.finditer(page)]


def with_links(page: str, made: Path = MADE) -> str:
    """Return the page with a link to each report that has been made."""
    for entry in entries():
        if (made / f"{entry.name}.html").exists():
            heading = f"### {entry.title} {{#{entry.name}}}\n"
            page = page.replace(heading, f"{heading}\n[Open the report](gallery/{entry.name}.html)\n")
    return page


def make(entry: Entry, made: Path = MADE) -> Path:
    """Make one run in a new folder and keep its report; return the page.

    Raises:
        RuntimeError: the run left no report.
    """
    folder = made / "runs" / entry.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [sys.executable, "-m", "rlinf_cli", *entry.arguments]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    reports = list(folder.glob("runs/*/report.html"))
    if len(reports) != 1:
        raise RuntimeError(f"rlinf {shlex.join(entry.arguments)} left no report\n{done.stdout}{done.stderr}")
    return Path(shutil.copy(reports[0], made / f"{entry.name}.html"))


def main(names: list[str]) -> int:
    """Make the runs of some names, or all; return the exit status."""
    known = entries()
    unknown = sorted(set(names) - {entry.name for entry in known})
    if unknown:
        print(f"no such run: {', '.join(unknown)}; there are {', '.join(entry.name for entry in known)}")
        return 2
    for entry in known:
        if not names or entry.name in names:
            print(make(entry), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
