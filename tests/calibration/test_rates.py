"""Rates are work divided by time: measurements with given times, on machines whose rates are known."""

from __future__ import annotations

import json
import os
import platform
import re
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from trimtab.calibration import compute_rates, transfer_rates
from trimtab.calibration.calibration_settings import (
    GPU_SEQUENCE_LENGTH,
    GPU_TOKENS,
    SEQUENCE_LENGTH,
    TOKENS,
    CalibrationSettings,
    settings_for,
    small_config,
)
from trimtab.calibration.compute_rates import DenseFit, ExpertFit, measure_dense, measure_experts
from trimtab.calibration.fits import Fit
from trimtab.calibration.measurement import MeasurementContext
from trimtab.calibration.transfer_rates import ExchangeFits, LinkRates, measure_exchange, measure_links, measure_memory
from trimtab.cluster import ModelSpec
from trimtab.runtime.transfer.streams import BackgroundCopies
from trimtab.trace import RoutingTrace

HIDDEN, WIDTH = 32, 16
MODEL = ModelSpec("m", num_experts=8, top_k=2, hidden_size=HIDDEN, expert_width=WIDTH, weight_bytes=4, vocab_size=64)
CPU = torch.device("cpu")
CONFIG = small_config(layers=2, hidden=32, width=16, experts=8, top_k=2) | {
    "vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def model_of(folder: Path) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return ModelSpec.from_config(folder)


def context_of(**values: Any) -> Any:
    """What measurements read of a context, on rank 1 of 4, two on each node."""
    topology = SimpleNamespace(rank=1, num_ranks=4, ranks_per_node=2, control=None, experts=None)
    usual = {"topology": topology, "alone": None, "device": CPU, "model": MODEL, "dtype": torch.float32, "tokens": 64}
    return SimpleNamespace(**usual | values)


def test_memory_is_read_and_written() -> None:
    """A copy of 64 MiB moves 128 MiB. AdamW moves 30 bytes for each of 4 Mi weights."""
    asked = {}

    def seconds(works: dict[str, Any]) -> dict[str, float]:
        asked.update(works)
        return {"copy": 0.5, "step": 0.25}

    memory, optimizer = measure_memory(context_of(seconds=seconds))
    assert asked.keys() == {"copy", "step"}
    assert memory == 128 * 2**20 / 0.5
    assert optimizer == 30 * 4 * 2**20 / 0.25


def test_rates_of_an_all_to_all_are_bytes_to_other_ranks() -> None:
    """Rows to a rank itself use no link. A row has 32 numbers of 4 bytes."""

    def of_work(work: partial[Any]) -> float:
        rows, splits, received, _ = work.args
        assert splits == received
        assert len(rows) == sum(splits)
        return 2e-6 + splits[0] * 128 / 5e9 + (splits[2] + splits[3]) * 128 / 2e8

    def seconds(works: dict[str, partial[Any]]) -> dict[str, float]:
        return {name: of_work(work) for name, work in works.items()}

    random = lambda *shape: torch.zeros(shape)  # noqa: E731
    found = measure_exchange(context_of(seconds=seconds, random=random))
    assert found.near
    assert found.far
    assert found.near.rates == pytest.approx((5e9,))
    assert found.far.rates == pytest.approx((2e8,))
    assert found.near.fixed_s + found.far.fixed_s == pytest.approx((2e-6, 2e-6))
    # One node has no links to others, and a node of one rank none inside.
    for per_node, sends in ((4, ([True] * 4, None)), (1, (None, [False, True, True, True]))):
        topology = SimpleNamespace(rank=0, num_ranks=4, ranks_per_node=per_node, experts=None)
        with mock.patch.object(transfer_rates, "_measure_exchange", lambda _, sends: sends):
            measured: Any = measure_exchange(context_of(topology=topology))
        assert (measured.near, measured.far) == sends


def test_rates_of_experts_are_operations_of_three_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 operations for each of 3 x 32 x 16 weights of an expert, for every row; memory takes no time."""
    layer_s, copy_s, row_s = 5e-5, 3e-6, 2 * 3 * HIDDEN * WIDTH / 4e9

    def times(trace: RoutingTrace) -> dict[str, float]:
        rows = np.bincount(trace.expert_ids.reshape(-1), minlength=8)
        forward = layer_s + copy_s * np.count_nonzero(rows) + row_s * rows.sum()
        return {"forward_s": forward, "backward_s": (9.0 if rows.max() < 10 else 2.5) * forward}

    def medians(variants: dict[str, Any]) -> dict[str, dict[str, float]]:
        assert not session.close.called
        return {name: times(trace) for name, trace in variants.items()}

    session = mock.Mock()
    monkeypatch.setattr(compute_rates, "Session", lambda **_: session)
    monkeypatch.setattr(compute_rates, "add_random_layer", lambda *_: None)
    monkeypatch.setattr(compute_rates, "_expert_variant", lambda context, session, layer, trace: trace)
    topology = SimpleNamespace(rank=0, num_ranks=1)
    found = measure_experts(context_of(topology=topology, tokens=512, medians=medians), 1e30)
    assert found.fit.rates == pytest.approx((4e9,), rel=1e-6)
    assert found.fit.fixed_s == pytest.approx((copy_s, layer_s), rel=1e-4)
    # Few rows, of which backward is mostly gradients of weights, do not count for the ratio.
    assert found.backward == pytest.approx(2.5)
    assert found.tile_rows is None
    assert found.backward_error == pytest.approx(0)
    session.close.assert_called_once()


def test_exchanges_are_subtracted_from_the_time_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange takes 1 s; a forward with two of them 12 s, and a backward 22 s."""
    now = [0.0]

    def spend(seconds: float) -> Any:
        now[0] += seconds
        return SimpleNamespace(backward=lambda _: spend(22.0))

    layer: Any = mock.Mock(parameters=[], side_effect=lambda *_: spend(12.0))
    session: Any = SimpleNamespace(plan=lambda *_: None, micro_step=lambda _: nullcontext())
    monkeypatch.setattr(compute_rates, "exchange_rows", lambda *_: spend(1.0))
    clock = SimpleNamespace(now=lambda: now[0], seconds=lambda start, end: end - start)
    context = context_of(clock=clock, begin=clock.now, random=lambda *shape: torch.zeros(shape))
    trace = RoutingTrace.from_sequences([np.arange(8).reshape(4, 1, 2)], num_experts=8)
    run = compute_rates._expert_variant(context, session, layer, trace)
    assert run() == {"forward_s": 10.0, "backward_s": 20.0}


def test_rates_of_dense_parts_are_operations_of_projections_and_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token takes 2 operations for each weight of a layer's attention and router, and of the head."""
    model = model_of(tmp_path)
    projections = 2 * (32 * (32 + 16 + 16) + 32 * 32) + 2 * 32 * 8
    layer_s, rate, attention_rate = 2e-5, 3e9, 1e9

    def times(layers: int, count: int, length: int) -> dict[str, float]:
        seconds = layers * layer_s + count * length * (layers * projections + 2 * 32 * 64) / rate
        # Scores and weighted sums: 2 operations each, in 2 heads of 16, for the pairs that the mask leaves.
        seconds += layers * count * length**2 / 2 * 2 * 2 * 2 * 16 / attention_rate
        return {"forward_s": seconds, "backward_s": 1.75 * seconds}

    def medians(variants: dict[str, tuple[int, int, int]]) -> dict[str, dict[str, float]]:
        # Sequences of the usual length or a multiple of it, of which as many as make up a fraction of the tokens.
        assert {length / 32 for _, _, length in variants.values()} == {1, 4, 8}
        assert {count * length for _, count, length in variants.values()} == {1024, 512, 256}
        return {name: times(*point) for name, point in variants.items()}

    monkeypatch.setattr(compute_rates, "_without_experts", lambda *_: None)
    monkeypatch.setattr(compute_rates, "_dense_variant", lambda context, model, *point: point)
    found = measure_dense(context_of(model=model, tokens=1024, sequence_length=32, medians=medians), {}, 1e30)
    assert found.fit.rates == pytest.approx((rate, attention_rate), rel=1e-6)
    assert found.fit.fixed_s == pytest.approx((layer_s,), rel=1e-4)
    assert found.backward == pytest.approx(1.75)


def test_dense_parts_are_timed_in_as_many_layers_and_without_experts() -> None:
    now = iter(range(100))
    clock = SimpleNamespace(now=lambda: next(now), seconds=lambda start, end: float(end - start))
    context = context_of(clock=clock, begin=clock.now)
    model = compute_rates._without_experts(CONFIG | {"num_hidden_layers": 7}, context)
    assert len(model.model.layers) == 2
    assert max(parameter.ndim for parameter in model.parameters()) == 2
    ran: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    hidden, weights = torch.rand(3, HIDDEN, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    assert torch.equal(model.model.layers[0].mlp.experts(hidden, torch.zeros(3, 2), weights), hidden)
    # All layers are back after each, in which gradients begin at zero.
    gradients: dict[tuple[int, int], torch.Tensor] = {}
    for layers in (2, 1, 0, 2):
        torch.manual_seed(0)
        assert compute_rates._dense_variant(context, model, layers, 2, 5)() == {"forward_s": 1.0, "backward_s": 1.0}
        assert ran == [*range(layers)]
        ran.clear()
        assert len(model.model.layers) == 2
        gradients[layers, len(gradients)] = model.lm_head.weight.grad.clone()
    assert torch.equal(gradients[2, 0], gradients[2, 3])


def test_rates_of_links_are_bytes_that_were_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The works run, and their time is that of the bytes that they copy at 1 GB/s."""
    copied = []

    class Counting(BackgroundCopies):
        def start(self, pairs: Any) -> Any:
            copied.append(sum(source.nbytes for _, source in pairs))
            return super().start(pairs)

    stacks = [torch.zeros(2, 2 * WIDTH, HIDDEN), torch.zeros(2, HIDDEN, WIDTH)]
    layer = SimpleNamespace(homes=SimpleNamespace(parameters=stacks, sources=stacks))
    monkeypatch.setattr(transfer_rates, "Session", lambda **_: SimpleNamespace(homes=[layer.homes]))
    monkeypatch.setattr(transfer_rates, "add_random_layer", lambda *_: layer)
    mirror = SimpleNamespace(row=lambda *_: [stack[0] for stack in stacks], close=lambda: None)
    monkeypatch.setattr(transfer_rates, "mirror_of", lambda *_: mirror)
    monkeypatch.setattr(transfer_rates, "BackgroundCopies", Counting)
    sent: list[int] = []
    monkeypatch.setattr(dist, "P2POp", lambda send, tensor, **_: (send, tensor.nbytes))

    def exchange(operations: list[tuple[Any, int]]) -> list[Any]:
        sent.extend(size for send, size in operations if send is dist.isend)
        return []

    monkeypatch.setattr(dist, "batch_isend_irecv", exchange)

    def seconds(works: dict[str, Any]) -> dict[str, float]:
        found = {}
        for name, work in works.items():
            copied.clear()
            sent.clear()
            work()
            moved = sum(copied) + sum(sent)
            assert moved > 0
            found[name] = moved / {"host": 1e9, "near": 2e9, "far": 3e9}[name]
        return found

    taxed: list[tuple[float, bool]] = []

    def tax(_: Any, transfer: Any, transfer_s: float) -> float:
        sent.clear()
        transfer()
        taxed.append((transfer_s, bool(sent)))
        return 0.25

    monkeypatch.setattr(transfer_rates, "_tax", tax)
    topology = SimpleNamespace(rank=1, num_ranks=4, ranks_per_node=2, weights=None)
    rates = measure_links(context_of(topology=topology, seconds=seconds))
    assert rates == LinkRates(1e9, 2e9, 3e9, tax=0.25)
    # Of messages between nodes.
    ((transfer_s, are_messages),) = taxed
    assert are_messages
    assert transfer_s == pytest.approx(sum(sent) / 3e9)


@pytest.mark.parametrize(("slowed_s", "tax"), [(0.3, 0.0), (0.42, 0.24), (9.0, 1.0)])
def test_the_tax_is_what_products_take_longer_beside_a_transfer(slowed_s: float, tax: float) -> None:
    """A transfer takes 0.5 s and a product 0.03: 34 of them take longer than two transfers."""
    calls: list[str] = []

    def seconds(works: dict[str, Any]) -> dict[str, float]:
        for work in works.values():
            work()
        found = {"product": 0.03, "products": 0.3, "beside": slowed_s}
        return {name: found[name] for name in works}

    context = SimpleNamespace(
        device=CPU,
        tokens=4,
        model=SimpleNamespace(hidden_size=3),
        seconds=seconds,
        random=lambda *shape: torch.ones(shape),
    )
    found = transfer_rates._tax(context, lambda: calls.append("transfer"), 0.5)  # type: ignore[arg-type]
    assert found == pytest.approx(tax)
    assert calls == ["transfer"]

    def fail() -> None:
        raise ConnectionError("the other rank has ended")

    with pytest.raises(ConnectionError, match="has ended"):
        transfer_rates._tax(context, fail, 0.5)  # type: ignore[arg-type]


def test_every_rate_goes_to_its_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate = import_module("trimtab.calibration.calibrate")
    context = SimpleNamespace(device=CPU, topology=SimpleNamespace(rank=0, num_ranks=4, ranks_per_node=2))
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    monkeypatch.setattr(calibrate.MeasurementContext, "of_all_ranks", lambda *_, **__: context)
    monkeypatch.setattr(calibrate, "measure_memory", lambda _: (3e9, 4e9))
    monkeypatch.setattr(calibrate, "measure_links", lambda _: LinkRates(1e9, 5e9, 7e9, tax=0.3))
    far, near = Fit((2e8,), (4e-6,), 0.02), Fit((11e9,), (1e-6,), 0.01)
    monkeypatch.setattr(calibrate, "measure_exchange", lambda _: ExchangeFits(near, far))
    experts = ExpertFit(Fit((17e12,), (3e-6, 4e-6), 0.03), 64, 2.25, 0.05)
    monkeypatch.setattr(calibrate, "measure_experts", lambda *_: experts)
    dense = DenseFit(Fit((19e12, 23e12), (5e-6,), 0.07), 1.75, 0.04)
    monkeypatch.setattr(calibrate, "measure_dense", lambda *_: dense)
    settings = CalibrationSettings(
        CONFIG, model_of(tmp_path), ranks=4, tokens=64, sequence_length=8, name="n", rounds=1
    )
    taken = calibrate._measure(settings)
    values = {name: figure and figure["value"] for name, figure in taken["figures"].items()}
    assert values.pop("device_bytes") == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    assert values.pop("planning_threads") == 3
    names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert taken["machine"].startswith(names[0] if names else platform.processor() or platform.machine())
    assert values == pytest.approx(
        {
            "expert_flops": 17e12, "tile_rows": 64, "copy_s": 3e-6, "expert_backward": 2.25,
            "dense_flops": 19e12, "attention_flops": 23e12, "layer_s": 9e-6, "dense_backward": 1.75,
            "memory_bytes_per_s": 3e9, "host_bytes_per_s": 1e9, "node_bytes_per_s": 5e9, "network_bytes_per_s": 7e9,
            "dispatch_node_bytes_per_s": 11e9, "dispatch_network_bytes_per_s": 2e8, "dispatch_s": 4e-6,
            "transfer_tax": 0.3,
        }
    )  # fmt: skip
    assert taken["checks"] == {"optimizer_bytes_per_s": 4e9}
    assert (taken["ranks"], taken["ranks_per_node"]) == (4, 2)


def test_sizes_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, sizes in ((0, (2, TOKENS, SEQUENCE_LENGTH)), (8, (8, GPU_TOKENS, GPU_SEQUENCE_LENGTH))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        chosen = settings_for(None, ranks=None, rounds=1, name="n")
        assert (chosen.ranks, chosen.tokens, chosen.sequence_length) == sizes


def test_figures_are_medians_over_rounds_and_means_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank takes 1, 3, 5 and 7 s more for the four figures."""
    monkeypatch.setattr(
        dist, "all_reduce",
        lambda values, group: values.copy_(2 * values + torch.tensor([1, 3, 5, 7], dtype=torch.float64)),
    )  # fmt: skip
    given = {"a": [9.0, 9.0, 4.0, 2.0, 9.0], "b": [9.0, 9.0, 10.0, 30.0, 20.0]}
    turns = {name: iter(values) for name, values in given.items()}

    def variant(name: str) -> dict[str, float]:
        value = next(turns[name])
        return {"forward_s": value, "backward_s": 2 * value}

    context = MeasurementContext(
        topology=SimpleNamespace(num_ranks=2, control=None),  # type: ignore[arg-type]
        alone=None, device=CPU, clock=None, model=MODEL, dtype=torch.float32, tokens=1, sequence_length=1, rounds=3,  # type: ignore[arg-type]
    )  # fmt: skip
    # The first two rounds are warm-up.
    assert context.medians({name: partial(variant, name) for name in given}) == {
        "a": {"forward_s": 4.5, "backward_s": 9.5},
        "b": {"forward_s": 22.5, "backward_s": 43.5},
    }
