"""Pages of the site that are no files of this folder: the examples, the changes, the Python API, and reports of the
gallery that have been made. See mkdocs.yml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from docs import gallery

REPOSITORY = Path(__file__).parents[1]
# A link out of docs/, by as many folders as its page lies below it, or to the notes in docs/dev/.
_UP = r"\[([^\]]+)\]\((?:(?:\.\./){%d}|dev/)[^)]*\)"

# A key alone in a cell, as the models name it.
_KEY = re.compile(r"(?<=<td><code>)[\w.\[\]]+(?=</code></td>)")

# What is not below docs/ and has a page of the site.
_MADE_FROM = {"examples": "examples.md", "CHANGELOG.md": "changes.md", "rlinf_core/__init__.pyi": "api.md"}
_LANGUAGES = {".py": "python", ".yaml": "yaml"}

# A block that is to be saved as a file: its name becomes the title.
_NAMED = re.compile(r"^```(\w+) file=(\S+)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here."""
    for name, text in {"examples.md": _examples(), "changes.md": _changes(), "api.md": _api()}.items():
        files.append(File.generated(config, name, content=text))
    for report in sorted(gallery.MADE.glob("*.html")):
        files.append(File.generated(config, f"gallery/{report.name}", abs_src_path=str(report)))
    return files


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


def _api() -> str:
    """Return a page of every public name of `rlinf_core`, by its kind; each is documented by its docstring."""
    import inspect

    import rlinf_core

    kinds: dict[str, list[str]] = {"Classes": [], "Functions": [], "Errors": []}
    for name in sorted(rlinf_core.__all__):
        public = getattr(rlinf_core, name)
        if inspect.isclass(public):
            kinds["Errors" if issubclass(public, BaseException) else "Classes"].append(_entry(public))
        elif inspect.isfunction(public):
            kinds["Functions"].append(_entry(public))
    head = "# Python API\n\nEvery public name of `rlinf_core`, imported as in `from rlinf_core import Cluster`.\n"
    return head + "\n".join(f"\n## {kind}\n\n{''.join(entries)}" for kind, entries in kinds.items())


def _entry(public: Any) -> str:
    return f"::: {public.__module__}.{public.__qualname__}\n\n"
