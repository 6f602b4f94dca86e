"""Stage `mirror`: 2,000 experts in the mirrors of two nodes, written and sent twice."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist

from trimtab.calibration.random_experts import add_random_layer, this_device
from trimtab.cluster import ModelSpec
from trimtab.doctor.finding import Finding
from trimtab.report.number_text import bytes_text, plural
from trimtab.runtime import Session
from trimtab.runtime.transfer.mirror import NodeMirror

ENTRIES = 2000
LAYERS = 8
REFRESHES = 2
# Integers below it are exact in bfloat16.
VALUES = 251


def check_mirror() -> list[Finding]:
    """Fill mirrors, and compare their contents. The ranks are divided in two nodes, so that they also send experts."""
    device, ranks = this_device(), dist.get_world_size()
    per_node = ranks // 2 if ranks % 2 == 0 else 1
    experts_per_rank = -(-ENTRIES // (LAYERS * ranks))
    model = ModelSpec("doctor", experts_per_rank * ranks, 1, hidden_size=64, expert_width=16)
    session = Session(num_experts=model.num_experts, ranks_per_node=per_node)
    homes = [add_random_layer(session, model, torch.bfloat16, device).homes for _ in range(LAYERS)]
    mirror = NodeMirror(session.topology, homes[0].expert_like, device)
    pairs = np.stack(np.divmod(np.arange(ENTRIES), model.num_experts), axis=1)
    # Another order on each node.
    mirror.hold([np.random.default_rng(node).permutation(pairs) for node in range(ranks // per_node)])
    wrong, sent = 0, 0
    start = time.perf_counter()
    for number in range(REFRESHES):
        # No rank may still be reading.
        dist.barrier(group=session.topology.expert_control)
        for layer in homes:
            for row, expert in enumerate(layer.home_experts.tolist()):
                for source in layer.sources:
                    source[row].fill_(_weight(number, layer.index, expert))
        sent += mirror.refresh(homes)
        wrong += sum(
            not all(bool((tensor == _weight(number, layer, expert)).all()) for tensor in mirror.row(layer, expert))
            for layer, expert in pairs.tolist()
        )
    taken_s = time.perf_counter() - start
    pinned = device.type != "cuda" or mirror.row(*pairs[0].tolist())[0].is_pinned()
    mirror.close()
    session.close()
    return [describe_mirror(wrong, pinned=pinned, sent=sent, taken_s=taken_s, nodes=ranks // per_node)]


def describe_mirror(wrong: int, *, pinned: bool, sent: int, taken_s: float, nodes: int) -> Finding:
    """The finding about a mirror.

    Args:
        wrong: entries with other weights than their home has.
        pinned: the device can copy from it without a further copy on the host.
        sent: bytes that this rank sent to other nodes.
        taken_s: seconds of writing and comparing.
    """
    name = "contents"
    if wrong:
        text = f"{wrong} of {REFRESHES * ENTRIES} entries are wrong; do not train on this machine"
        return Finding(name, "problem", text)
    where = f"{ENTRIES:,} entries on each of {plural(nodes, 'node')}"
    text = f"{where} are right after {REFRESHES} refreshes, in {taken_s:.1f} s"
    if not pinned:
        return Finding(name, "warning", f"{text}; the memory is not pinned, so copies to the GPU are slower")
    return Finding(name, "ok", f"{text}; a rank sent {bytes_text(sent)}")


def _weight(number: int, layer: int, expert: int) -> int:
    """The value of all weights of an expert. Different for any two refreshes that follow each other."""
    return (number + 13 * layer + 3 * expert) % VALUES
