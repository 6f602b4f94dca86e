"""What the stages of `trimtab doctor --gpu` find on a CPU: nothing in order, and everything that is broken."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from trimtab.cluster import ClusterSpec
from trimtab.doctor.finding import Finding
from trimtab.doctor.gpu import micro_step_stages, transfer_stages
from trimtab.doctor.gpu.environment_stage import NO_GPU, check_peer_access
from trimtab.doctor.gpu.gpu_examination import STAGES
from trimtab.doctor.gpu.micro_step_stages import check_synchronisation, describe_layer, find_wait
from trimtab.doctor.gpu.stage_process import Stage
from trimtab.doctor.gpu.transfer_stages import describe_mirror
from trimtab.doctor.self_check import PathCheck
from trimtab.runtime.layer.layer import ExpertLayer
from trimtab.runtime.transfer import message_rounds
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import PeerMemory, Place
from trimtab.runtime.transfer.returns import GradientReturns

CPU = torch.device("cpu")


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
@runs_on_ranks()
def test_every_stage_passes_on_two_ranks(stage: Stage) -> None:
    findings = stage.run()
    assert findings
    unusual = [finding for finding in findings if finding.status != "ok"]
    assert unusual == ([Finding("device", "warning", NO_GPU)] if stage.name == "environment" else [])
    if stage.name == "bandwidth":
        links = ["host path", "copy-engine pulls", "messages", "all-to-all"]
        assert [finding.name for finding in findings] == links


@runs_on_ranks(1)
def test_layers_are_timed_on_one_rank() -> None:
    """As on a machine with one GPU."""
    with mock.patch.object(micro_step_stages, "CPU_TOKENS", (16,)):
        (finding,) = micro_step_stages.check_layer()
    assert finding.status == "ok"


def rewrite_without_writing() -> None:
    with mock.patch.object(PeerMemory, "fill"):
        (finding,) = transfer_stages.check_rewriting()
    assert finding.status == "problem"


def refresh_once() -> None:
    refresh, calls = NodeMirror.refresh, itertools.count()
    with mock.patch.object(NodeMirror, "refresh", lambda *args: 0 if next(calls) else refresh(*args)):
        (finding,) = transfer_stages.check_mirror()
    assert finding.status == "problem"
    assert finding.text.startswith("2000 of 4000 entries are wrong")


def leave_an_element_of_one_expert() -> None:
    refresh = NodeMirror.refresh

    def refresh_all_but_one(mirror: NodeMirror, layers: Any) -> int:
        sent = refresh(mirror, layers)
        mirror.row(0, 0)[-1].view(-1)[-1] = -1
        return sent

    with mock.patch.object(NodeMirror, "refresh", refresh_all_but_one):
        (finding,) = transfer_stages.check_mirror()
    assert finding.status == "problem"


def soak_with_rows_that_stay() -> None:
    with (
        mock.patch.object(transfer_stages, "CPU_SECONDS", 0.1),
        mock.patch.object(transfer_stages, "exchange_rows", lambda rows, *_, **__: rows),
    ):
        (finding,) = transfer_stages.check_soak()
    assert finding.status == "problem"


def soak_that_sends_old_values() -> None:
    sent: dict[Any, torch.Tensor] = {}

    def earlier(messages: Any, rank: int, group: Any, *, tag: int) -> Any:
        """Sends what the same message of the round before has."""
        (mine,) = (each for each in messages if each.sender == rank)
        place = group, tag % transfer_stages.MESSAGES
        late = mine._replace(tensor=sent.get(place, mine.tensor))
        sent[place] = mine.tensor
        return message_rounds.post([late if each is mine else each for each in messages], rank, group, tag=tag)

    with mock.patch.object(transfer_stages, "CPU_SECONDS", 0.1), mock.patch.object(transfer_stages, "post", earlier):
        (finding,) = transfer_stages.check_soak()
    assert finding.status == "problem"


def lose_gradients_in_bfloat16() -> None:
    with mock.patch.object(GradientReturns, "_add"):
        findings = micro_step_stages.check_equality()
    assert {finding.status for finding in findings} == {"problem"}
    assert len(findings) == 6


def wait_in_every_layer() -> None:
    def check_shapes(self: ExpertLayer, hidden: torch.Tensor, *_: Any) -> None:
        # As counts that are read on the host.
        hidden.sum().item()

    with mock.patch.object(ExpertLayer, "_check_shapes", check_shapes):
        findings = check_synchronisation()
    assert findings[-1].status == "problem"
    assert "_local_scalar_dense" in findings[-1].text


BROKEN = [
    rewrite_without_writing, leave_an_element_of_one_expert, soak_with_rows_that_stay, soak_that_sends_old_values,
    wait_in_every_layer, pytest.param(refresh_once, marks=pytest.mark.nightly),
    pytest.param(lose_gradients_in_bfloat16, marks=pytest.mark.nightly),
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_stages_find_what_is_broken(broken: Callable[[], None]) -> None:
    on_ranks(broken, ranks=2)


@runs_on_ranks()
def test_messages_in_place_of_peer_memory_are_a_limit() -> None:
    def check(path: str, *_: Any, **__: Any) -> PathCheck:
        return PathCheck(path, 4, 0.0, reads_peers=False)

    with mock.patch.object(micro_step_stages, "check_path", check):
        findings = micro_step_stages.check_equality()
    assert [finding.status for finding in findings] == ["ok", "warning", "ok", "ok"] * 2
    assert "sent as messages" in findings[1].text


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.nonzero, lambda x: bool(x > 1), lambda x: x[x > 0]])
def test_reading_a_value_is_a_wait(read: Callable[[torch.Tensor], object]) -> None:
    assert find_wait(lambda: torch.ones(4) @ torch.ones(4), CPU) is None
    place = find_wait(lambda: read(torch.ones(1)), CPU)
    assert place is not None
    assert place.startswith("test_gpu_stages.py:")


def test_less_than_half_of_the_expected_rate_is_a_limit_with_both_figures() -> None:
    cluster = ClusterSpec(8, 8, host_bytes_per_s=60e9, name="gpus")
    assert transfer_stages.compare_rate("host path", 31e9, cluster).status == "ok"
    finding = transfer_stages.compare_rate("host path", 29e9, cluster)
    assert finding.status == "warning"
    assert finding.text.startswith("29.0 GB/s, where 60.0 GB/s is expected of gpus")
    assert transfer_stages.compare_rate("host path", 1.0, None).status == "ok"


def test_a_layer_that_takes_twice_its_estimate_is_a_limit() -> None:
    expected = {"dispatch": 1e-3, "experts": 2e-3}
    measured = {"dispatch": 1e-3, "experts": 4.9e-3, "waiting": 9.0}
    finding = describe_layer("4,096 tokens", measured, expected)
    assert finding.status == "ok"
    assert "experts 4.90 ms (estimate 2.00 ms)" in finding.text
    assert "together 5.90 ms (estimate 3.00 ms)" in finding.text
    assert describe_layer("", measured | {"dispatch": 1.2e-3}, expected).status == "warning"
    assert describe_layer("", measured, {}).status == "ok"


def test_mirrors_that_are_wrong_or_not_pinned() -> None:
    statuses = [
        describe_mirror(wrong, pinned=pinned, sent=1, taken_s=1.0, nodes=2).status
        for wrong, pinned in ((0, True), (0, False), (1, True))
    ]
    assert statuses == ["ok", "warning", "problem"]


def test_peer_access_is_that_of_the_ranks_gpus_by_uuid() -> None:
    places = [Place("host", uuid, 0) for uuid in "abc"]
    assert check_peer_access(places, 0, {"b": True, "c": True}).text == "all 3 GPUs read each other's memory"
    closed = check_peer_access(places, 0, {"b": True, "c": False})
    assert closed.status == "warning"
    assert "GPUs of ranks 2;" in closed.text
    assert check_peer_access(places, 0, {"b": True}).text.startswith("1 GPU of other ranks not visible")
    assert check_peer_access([*places, places[0]], 0, {"b": True, "c": True}).status == "problem"
