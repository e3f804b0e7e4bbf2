"""Warnings about groups that declare hardware without a unit."""

from __future__ import annotations

from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.rules.site import Site


def check(site: Site) -> None:
    for path, group in site.groups():
        configs = (*path, "hardware", "configs")
        if group.hardware is not None and not group.hardware.configs and not site.damaged(configs):
            site.report(
                "hardware-empty",
                f"group `{group.label}` declares hardware but no units",
                configs,
                help="add an entry for each unit, or remove `hardware` to count accelerators or nodes",
                severity=Severity.WARNING,
            )
