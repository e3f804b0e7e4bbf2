"""The metrics of a run as Prometheus scrapes them."""

from __future__ import annotations

import math
import socket
from collections.abc import Generator
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlinf_core.errors import RunError
from rlinf_core.job.load import load_job
from rlinf_core.runners.exporters.metrics_backend import BackendSettings
from rlinf_core.runners.exporters.prometheus_exporter import PrometheusExporter, metric_name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def exporter(tmp_path: Path) -> Generator[PrometheusExporter]:
    exporter = PrometheusExporter(BackendSettings(tmp_path, "rlinf", "embodied-1", {}), free_port())
    yield exporter
    exporter.close()


def scraped(exporter: PrometheusExporter) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"embodied-1"}
    return {sample.name: sample.value for sample in samples}


def test_the_newest_value_of_each_metric_is_served(exporter: PrometheusExporter) -> None:
    exporter.log(1, {"env/return": 1.5, "eval/pass@1": 0.25})
    exporter.log(2, {"env/return": 2.5, "train/actor/grad_norm": math.nan})
    values = scraped(exporter)
    assert math.isnan(values.pop("rlinf_train_actor_grad_norm"))
    assert values.pop("rlinf_step_timestamp_seconds") > 1.7e9
    assert values == {"rlinf_step": 2, "rlinf_env_return": 2.5, "rlinf_eval_pass_at_1": 0.25}
    exporter.rewind(1)
    assert scraped(exporter)["rlinf_step"] == 1


def test_only_loopback_listens(exporter: PrometheusExporter) -> None:
    assert exporter._server.server_address[0] == "127.0.0.1"


def test_a_taken_port_is_named(exporter: PrometheusExporter, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"metrics cannot be served at port {exporter.port}"):
        PrometheusExporter(BackendSettings(tmp_path, "rlinf", "other", {}), exporter.port)


@pytest.mark.parametrize(
    ("name", "gauge"),
    [
        ("env/return", "rlinf_env_return"),
        ("eval/my set/pass@8", "rlinf_eval_my_set_pass_at_8"),
        ("1/ü", "rlinf_1"),
    ],
)
def test_names_are_prometheus_names(name: str, gauge: str) -> None:
    assert metric_name(name) == gauge


def test_validate_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "prometheus_client" else real(name, *rest)
    )
    job = load_job("laptop", ["runner.metrics_port=9400"])
    (finding,) = [diagnostic for diagnostic in job.diagnostics if diagnostic.code == "missing-extra"]
    assert finding.path == ("runner", "metrics_port")
    assert "prometheus-client" in (finding.help or "")
