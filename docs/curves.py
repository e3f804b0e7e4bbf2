"""Draw docs/media/curves.svg from docs/results.yaml: success over steps, a panel for each experiment."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

DOCS: Final = Path(__file__).parent
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 480, 280, 44, 34, 16, 44
_COLOURS: Final = ("#2f6fde", "#d9702b", "#3d9a50")
_STYLE: Final = (
    "text{font:12px sans-serif;fill:#3b4252}.title{font-weight:bold;font-size:13px}"
    "polyline{fill:none;stroke-width:2}.grid{stroke:#d8dde6}"
)


def curves() -> str:
    """Return the picture."""
    panels: list[dict[str, Any]] = YAML(typ="safe").load(DOCS / "results.yaml")
    rows = -(-len(panels) // 2)
    drawn = [
        f'<g transform="translate({number % 2 * _WIDTH},{number // 2 * _HEIGHT})">{_panel(**panel)}</g>'
        for number, panel in enumerate(panels)
    ]
    size = f'width="{2 * _WIDTH}" height="{rows * _HEIGHT}" viewBox="0 0 {2 * _WIDTH} {rows * _HEIGHT}"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{_STYLE}</style>\n{background}\n'
    return head + "\n".join(drawn) + "\n</svg>\n"


def _panel(title: str, x: str, lines: dict[str, list[list[list[float]]]]) -> str:
    end = max(point[0] for runs in lines.values() for run in runs for point in run)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(point: list[float]) -> str:
        return f"{_LEFT + point[0] / end * (right - _LEFT):.1f},{bottom - point[1] * (bottom - _TOP):.1f}"

    parts = [f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>']
    for level in (0, 0.5, 1):
        y = bottom - level * (bottom - _TOP)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{level:g}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 18}" text-anchor="end">{end:,.0f} {escape(x)}</text>')
    for number, (name, runs) in enumerate(lines.items()):
        colour = _COLOURS[number]
        parts += [f'<polyline stroke="{colour}" points="{" ".join(map(place, run))}"/>' for run in runs]
        seeds = f"{len(runs)} seeds" if len(runs) > 1 else "1 seed"
        label = f"{escape(name)}, {seeds}"
        parts.append(f'<text x="{_LEFT + number * 140}" y="{bottom + 36}" style="fill:{colour}">{label}</text>')
    return "".join(parts)
