"""Skew of a trace, computed by hand and from several chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trimtab import RoutingTrace, write_trace
from trimtab.trace import TraceReader, store
from trimtab.trace.counting import layer_skew


def test_skew_equals_a_computation_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROW_GROUP_BYTES", 1)
    nothing = [255, 255]
    sequences = [[[[0, 1], [4, 3]], [[0, 2], nothing]], [[[1, 0], nothing]], [[nothing, [3, 4]], [[0, 4], [3, 4]]]]
    write_trace(RoutingTrace.from_sequences(sequences, num_experts=5), tmp_path / "trace.parquet")
    reader = TraceReader(tmp_path / "trace.parquet")
    assert len(list(reader.chunks())) == 3
    skew, unknown = layer_skew(reader)
    assert unknown == 3
    assert skew.token_counts_LE.tolist() == [[4, 2, 1, 0, 1], [0, 0, 0, 3, 3]]
    # 8 and 6 tokens, 1.6 and 1.2 by expert; of five experts, two are the busier half.
    np.testing.assert_allclose(skew.hottest_over_mean_L, [2.5, 2.5])
    np.testing.assert_allclose(skew.busier_half_share_L, [0.75, 1.0])
