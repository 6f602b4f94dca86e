"""What the price of a step may lack: the best balancers again, on clusters that are worse for copies or better without.

Each change is a cluster with other rates. All balancers plan for it, with the best of their constants and slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trimtab.cluster import ClusterSpec
from trimtab.simulator.comparison import Outcome, fits, simulate_policy
from trimtab.simulator.comparison_case import ComparisonCase

# Balancers that are simulated again.
BEST = 5
SLOW_NETWORK, EXPOSED = 25e9, 0.25


@dataclass(frozen=True)
class Sensitivity:
    """Seconds of a step by balancer after a change of the cluster.

    Attributes:
        name: of the change.
        about: what is assumed.
    """

    name: str
    about: str
    step_time_s: Mapping[str, float]


def _shared(cluster: ClusterSpec) -> ClusterSpec:
    return replace(
        cluster,
        node_bytes_per_s=min(cluster.node_bytes_per_s, cluster.dispatch_node_bytes_per_s),
        network_bytes_per_s=min(cluster.network_bytes_per_s, cluster.dispatch_network_bytes_per_s),
        transfer_tax=min(1.0, 2 * cluster.transfer_tax),
    )


def _slow_network(cluster: ClusterSpec) -> ClusterSpec:
    part = SLOW_NETWORK / max(SLOW_NETWORK, cluster.network_bytes_per_s) if cluster.nodes > 1 else 1.0
    return replace(
        cluster,
        network_bytes_per_s=part * cluster.network_bytes_per_s,
        dispatch_network_bytes_per_s=part * cluster.dispatch_network_bytes_per_s,
    )


def _without_host(cluster: ClusterSpec) -> ClusterSpec:
    has_links = cluster.node_bytes_per_s and cluster.network_bytes_per_s
    return replace(cluster, host_bytes_per_s=0.0) if has_links else cluster


def _hidden_dispatch(cluster: ClusterSpec) -> ClusterSpec:
    return replace(
        cluster,
        dispatch_node_bytes_per_s=cluster.dispatch_node_bytes_per_s / EXPOSED,
        dispatch_network_bytes_per_s=cluster.dispatch_network_bytes_per_s / EXPOSED,
        dispatch_s=cluster.dispatch_s * EXPOSED,
    )


# Name, what is assumed, and the cluster with it.
CHANGES: tuple[tuple[str, str, Callable[[ClusterSpec], ClusterSpec]], ...] = (
    (
        "links and memory shared",
        "copies move at the rate of all-to-alls and only between them, and take twice as much from compute",
        _shared,
    ),
    (
        "processors taken",
        "copies take half of their seconds from compute, as with 66 of 132 multiprocessors",
        lambda cluster: replace(cluster, transfer_tax=max(0.5, cluster.transfer_tax)),
    ),
    (
        "small groups are slow",
        "tiles of a grouped product have twice the rows, and a copy's fixed time is five times as long",
        lambda cluster: replace(cluster, tile_rows=2 * cluster.tile_rows, copy_s=5 * cluster.copy_s),
    ),
    ("25 GB/s network", "between nodes, with all-to-alls in proportion", _slow_network),
    ("no host path", "all copies come from other ranks", _without_host),
    ("dispatch hidden", "three quarters of all-to-alls run beside computing", _hidden_dispatch),
)


def sensitivities(case: ComparisonCase, outcomes: Mapping[str, Outcome]) -> tuple[Sensitivity, ...]:
    """Seconds of the best balancers that fit, `trimtab` among them if it ran: as priced, and after each change.

    Changes that leave a case as it is are left out.
    """
    real = {name: outcome for name, outcome in outcomes.items() if not outcome.policy.traits.ideal}
    fitting = [name for name, outcome in real.items() if fits(case, outcome)] or [*real]
    names = sorted(fitting, key=lambda name: (name != "trimtab", real[name].simulated.step_time_s))[:BEST]
    rows = [Sensitivity("as priced", "the cluster's rates", {n: real[n].simulated.step_time_s for n in names})]
    for name, about, change in CHANGES:
        changed = _on(case, change)
        if changed.cluster != case.cluster:
            times_s = {each: simulate_policy(changed, each).simulated.step_time_s for each in names}
            rows.append(Sensitivity(name, about, times_s))
    return tuple(rows)


def _on(case: ComparisonCase, change: Callable[[ClusterSpec], ClusterSpec]) -> ComparisonCase:
    return replace(case, cluster=change(case.cluster), halves=tuple(_on(half, change) for half in case.halves))
