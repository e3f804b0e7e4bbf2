"""`make bench`: every benchmark of these folders, one after another, and their tables in docs/dev/benchmarks.md.

    python -m benchmarks [NAME ...]

With names (as in `startup` for bench_startup.py) only those run, and only their sections of the page are written anew.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/dev/benchmarks.md"
HEAD = """\
# Benchmarks

Written by `make bench`: what each script of `benchmarks/` printed. Ratios are of one run on one machine; quote those.
"""
# What Ray's servers print into the terminal of whoever uses them is no result.
_RAY_SAYS = re.compile(r"(\x1b\[\d+m)?\((raylet|gcs_server|autoscaler)\b")
# Far above what the longest one takes.
_LIMIT_SECONDS = 1800


def machine() -> str:
    """Return what the figures were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, Python {platform.python_version()}"


def run(script: Path) -> tuple[int, str]:
    """Return the exit code and the results of one benchmark, which are shown while it runs, as is what it
    complains of.
    """
    print(f"== {script.stem}", flush=True)
    command = [sys.executable, "-u", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if not _RAY_SAYS.match(line):
                lines.append(line)
        return process.wait(_LIMIT_SECONDS), "".join(lines)


def purpose(script: Path) -> str:
    """Return the first sentence of the script's docstring."""
    return script.read_text(encoding="utf-8").split('"""')[1].split("\n\n")[0].replace("\n", " ").strip()


def section(script: Path, output: str, *, missed: bool) -> str:
    """Return what the page says of one benchmark."""
    when = f"{datetime.now(UTC).date().isoformat()}, {machine()}{'; a goal was missed' if missed else ''}"
    return f"## {script.stem}\n\n{purpose(script)}\n\n{when}:\n\n```\n{output.rstrip()}\n```\n"


def written(page: Path) -> dict[str, str]:
    """Return the sections of the page as it is, by benchmark."""
    if not page.exists():
        return {}
    _, *sections = page.read_text(encoding="utf-8").split("\n## ")
    return {section.split("\n", 1)[0]: f"## {section.rstrip()}\n" for section in sections}


def main() -> int:
    names = sys.argv[1:]
    scripts_by_name = {path.stem.removeprefix("bench_"): path for path in HERE.rglob("bench_*.py")}
    known = dict(sorted(scripts_by_name.items()))
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    scripts = [path for name, path in known.items() if not names or name in names]
    # A machine without a GPU keeps what `make gpu` showed on another.
    sections = {name: text for name, text in written(PAGE).items() if names or name == "on_gpu"}
    missed: list[str] = []
    for script in scripts:
        code, output = run(script)
        if code:
            missed.append(script.stem)
        sections[script.stem] = section(script, output, missed=bool(code))
    PAGE.write_text("\n".join([HEAD, *(sections[name] for name in sorted(sections))]), encoding="utf-8")
    if missed:
        print(f"goals missed or failed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
