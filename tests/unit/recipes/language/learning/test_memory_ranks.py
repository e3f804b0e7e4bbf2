"""Ranks that read, send and write their shards have what one rank has; each holds less, the more there are."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.language.bench_memory_ranks import differences, forecast, measure, write_model


@pytest.mark.nightly
def test_ranks_load_send_and_export_what_one_does(tmp_path: Path) -> None:
    write_model(tmp_path, width=64, layers=2)
    results = {count: measure(count, tmp_path, []) for count in (1, 2)}
    losses, norms, equal = differences(results)
    assert equal
    assert losses < 1e-5
    assert norms < 1e-4


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_peak_of_a_rank_falls_with_their_number(tmp_path: Path) -> None:
    parameters = write_model(tmp_path, width=512, layers=24)
    diagnostics = {count: measure(count, tmp_path, []) for count in (1, 2, 4)}
    losses, _, equal = differences(diagnostics)
    assert equal
    assert losses < 1e-5
    # What is in no layer, and a layer, each as weights and as gradients of two kinds; and what does not depend on it.
    apart, layer = 2 * 8 * 512**2, (4 + 3 * 11 // 4) * 512**2
    constant = 3 * 4 * (apart + 2 * layer) + (128 << 20)
    for phase in ("load", "sync", "train", "save", "export"):
        one, *_ = (rank["peaks"][phase] for rank in diagnostics[1])
        for count, ranks in diagnostics.items():
            assert max(rank["peaks"][phase] for rank in ranks) < one / count + constant, (phase, count, parameters)
    for count, ranks in diagnostics.items():
        peak = max(rank["peaks"]["train"] for rank in ranks)
        assert 0.85 < forecast(tmp_path, count, []) / peak < 1.15, count
