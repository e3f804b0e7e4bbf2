"""The ports of a node: those of Ray and of rlinf lie apart in the range of the file."""

from __future__ import annotations

import pytest

from rlinf_core.errors import ConfigError
from rlinf_core.node.ports import NodePorts


def test_ports_lie_in_the_range_and_apart() -> None:
    ports = NodePorts.of(range(20000, 21000))
    fixed = ports.fixed(head=True)
    assert len(set(fixed.values())) == len(fixed) == 9
    assert max(fixed.values()) < ports.first_worker < ports.last_worker < ports.first_data < ports.last_data == 20999
    assert (ports.full_range, ports.data) == ("20000-20999", "20672-20999")
    assert set(fixed) - set(ports.fixed(head=False)) == {"gcs", "dashboard", "client_server"}


def test_a_short_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 50 ports, Ray needs 100"):
        NodePorts.of(range(20000, 20050))
