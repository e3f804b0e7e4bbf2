"""Pages of the site that are no files of this folder: the examples, the changes, the Python API, and reports of the
gallery that have been made. See mkdocs.yml.
"""

from __future__ import annotations

import re
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path
from typing import Any

from docs import gallery

REPOSITORY = Path(__file__).parents[1]
# A link out of docs/, by as many folders as its page lies below it, or to what the site leaves out.
_UP = r"\[([^\]]+)\]\((?:(?:\.\./){%d}|dev/|container/)[^)]*\)"

# Guides come before pages that are made.
_LAST_IN_SEARCH = "---\nsearch: {boost: 0.2}\n---\n"

# A key alone in a cell, as the models name it.
_KEY = re.compile(r"(?<=<td><code>)[\w.\[\]]+(?=</code></td>)")

# What is not below docs/ and has a page of the site.
_MADE_FROM = {"examples": "examples.md", "CHANGELOG.md": "changes.md", "rlinf_core/__init__.pyi": "api.md"}
MADE = tuple(_MADE_FROM.values())
_LANGUAGES = {".py": "python", ".yaml": "yaml"}

# A block that is to be saved as a file: its name becomes the title.
_NAMED = re.compile(r"^```(\w+) file=(\S+)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here."""
    from mkdocs.structure.files import File  # what is made is tested where mkdocs is not installed

    for name in MADE:
        files.append(File.generated(config, name, content=_LAST_IN_SEARCH + page_of(name)))
    for report in sorted(gallery.MADE.glob("*.html")):
        files.append(File.generated(config, f"gallery/{report.name}", abs_src_path=str(report)))
    return files


def page_of(name: str) -> str:
    """Return the text of a page that is made here."""
    return {"examples.md": _examples, "changes.md": _changes, "api.md": _api}[name]()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page without links to what the site does not have, with the names of files above their blocks, and with
    links to the reports of the gallery.
    """
    if page.file.src_uri == "results.md":
        markdown = gallery.with_links(markdown)
    for source, made in _MADE_FROM.items():
        markdown = markdown.replace(f"](../{source})", f"]({made})")
    # They lead to files of the repository, which are no pages of the site: their text remains.
    to_code = _UP % (page.file.src_uri.count("/") + 1)
    return _NAMED.sub(r'```\1 title="\2"', re.sub(to_code, r"\1", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Return a page whose long keys in tables break behind their dots and underscores."""
    return _KEY.sub(lambda key: re.sub(r"([._])(?=\w)", r"\1<wbr>", key[0]), html)


def _examples() -> str:
    """Return a page of the files of examples/ that are plain text, each in full."""
    parts = ["# Examples\n", "Each is one file of the folder `examples` of the repository, and runs as it stands.\n"]
    for path in sorted((REPOSITORY / "examples").iterdir()):
        language = _LANGUAGES.get(path.suffix)
        if language is not None:
            text = path.read_text(encoding="utf-8").rstrip()
            parts.append(f"## {path.name}\n\n```{language}\n{text}\n```\n")
    return "\n".join(parts)


def _changes() -> str:
    return (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")


# Headings of the API page, each with the modules of `rlinf_core` whose names it has.
_SUBJECTS = {
    "Workers, channels and clusters": (
        "cluster",
        "worker",
        "channel",
        "load_balancing",
        "collective",
        "address",
        "context",
    ),
    "Placement": ("placement",),
    "Recipes, jobs and runs": ("job", "runners", "config"),
    "Algorithms": ("algorithms",),
    "Hardware": ("hardware",),
    "Errors": ("errors", "failures"),
}
_DOORS = ("recipes.embodied", "recipes.language", "recipes.agent", "recipes.demonstrations")


def _api() -> str:
    """Return a page of every public name, by its subject; each is documented by its docstring.

    Raises:
        ValueError: a name of `rlinf_core` is of no subject.
    """
    import rlinf_core

    parts = ["# Python API\n", "Imported as in `from rlinf_core import Cluster`, and from the packages named below.\n"]
    publics = _publics(rlinf_core)
    for subject, rooms in _SUBJECTS.items():
        chosen = {name: item for name, item in publics.items() if item.__module__.split(".")[1] in rooms}
        publics = {name: item for name, item in publics.items() if name not in chosen}
        parts.append(f"## {subject}\n")
        parts += [_entry(item) for item in chosen.values()]
    if publics:
        raise ValueError(f"{', '.join(publics)}: of no subject of the API page")
    for door in _DOORS:
        parts.append(f"## {door}\n")
        parts += [_entry(item) for item in _publics(import_module(door)).values()]
    others = [name for module in ("rlinf_core", *_DOORS) for name in _values(import_module(module))]
    parts.append(f"## Values and types\n\n{', '.join(others)}.\n")
    return "\n".join(parts)


def _values(module: Any) -> list[str]:
    """Return the names of a package that are neither classes nor functions, as code."""
    return [f"`{module.__name__}.{name}`" for name in sorted(set(module.__all__) - set(_publics(module)))]


def _publics(module: Any) -> dict[str, Any]:
    """Return the classes and functions that a package offers by name."""
    named = {name: getattr(module, name) for name in sorted(module.__all__)}
    return {name: item for name, item in named.items() if isclass(item) or isfunction(item)}


def _entry(public: Any) -> str:
    return f"::: {public.__module__}.{public.__qualname__}\n"
