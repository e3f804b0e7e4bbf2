"""All rules over a `cluster` section."""

from __future__ import annotations

from typing import Any

from rlinf_core.config.cluster import ClusterConfig
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.pruning import Validated
from rlinf_core.config.rules import environment, groups, hardware, machines
from rlinf_core.config.rules.site import Site


def check_cluster(cluster: ClusterConfig, view: Validated[Any], diagnostics: Diagnostics) -> None:
    """Report every contradiction within the section. `view` is the validated file that holds it."""
    site = Site(cluster, view, diagnostics)
    groups.check(site)
    environment.check(site)
    hardware.check(site)
    machines.check(site)
