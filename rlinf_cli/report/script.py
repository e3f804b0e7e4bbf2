"""The code of the chart library as one piece of JavaScript, for pages that load nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_cli.report.report_writing import MODULES
from rlinf_core.errors import RLinfError
from rlinf_core.process.requirements import install_command, missing_modules


def require_modules(what: str, modules: Sequence[str] = MODULES) -> None:
    """Check that the packages for HTML pages are installed.

    Args:
        what: the error message, as in `no report was written`.
        modules: the modules that the page needs.

    Raises:
        RLinfError: one is missing.
    """
    if missing := missing_modules(modules):
        listed = ", ".join(f"`{name}`" for name in missing)
        raise RLinfError(
            what,
            why=f"this Python does not have {listed}",
            help=f"run `{install_command(*missing)}`, or install rlinf-cli[report], which has all that pages need",
        )


def chart_script() -> str:
    """Return the JavaScript that draws Vega-Lite charts, as `window.vegaEmbed`.

    Bundling takes seconds, so the result is kept in the user's cache folder, by the versions of the libraries.
    """
    import vl_convert

    library: Any = vl_convert
    version: str = library.get_vegalite_versions()[-1]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = Path(home) / "rlinf" / f"charts-{library.__version__}-{version}.js"
    try:
        return kept.read_text(encoding="utf-8")
    except OSError:
        text = _inlinable(str(library.javascript_bundle(vl_version=version)))
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = kept.with_name(f".{kept.name}.{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(kept)
    except OSError:
        # The next page takes its seconds again.
        pass
    return text


def _inlinable(script: str) -> str:
    """Return JavaScript whose strings cannot end the element that holds it."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
