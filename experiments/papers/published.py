"""What papers published, and the set-ups in which we compute the same figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.papers.measures import (
    Measure,
    best_layer,
    gain,
    lost_in_layers,
    max_over_mean,
    of_balanced,
    product_seconds,
    rows,
    share,
    speedup,
    straggler_cut,
)
from trimtab.planner import Placement, Schedule, StepPlan
from trimtab.policies import Policy, View
from trimtab.policies.rivals.relibra import ReLibra
from trimtab.policies.rivals.routepack import RoutePack


@dataclass(frozen=True)
class SetUp:
    """A model on one expert-parallel group, and the steps that it trains.

    Attributes:
        model, cluster: presets.
        ranks: of the group.
        ranks_per_node: the cluster's by default; `ranks` for a rack in which all ranks have NVLink.
        layers: MoE layers simulated. The rest of the model counts in proportion.
        micro_steps, tokens: of a step, and mean tokens of a rank in each of them.
        mean_length, longest: tokens of a sequence.
        slots: replicas that a rank has room for.
        equal_terms: same homes, schedule and slots for all; else each balancer is run as its authors do.
    """

    model: str
    ranks: int
    cluster: str = "h100x8"
    ranks_per_node: int | None = None
    layers: int = 8
    micro_steps: int = 16
    tokens: int = 4096
    mean_length: int = 1024
    longest: int = 4096
    slots: int = 2
    equal_terms: bool = False

    @property
    def sequences(self) -> int:
        return self.ranks * self.micro_steps * self.tokens // self.mean_length

    @property
    def title(self) -> str:
        return f"{self.model}, EP {self.ranks}{', equal terms' if self.equal_terms else ''}"


@dataclass(frozen=True)
class Figure:
    """A figure that is computed in every set-up of a row.

    Attributes:
        published: the paper's, in words; empty where it has none.
        style: how it is written: `x` for a ratio of step times, `%` for a part, `` for a plain number.
    """

    title: str
    measure: Measure
    style: str = "x"
    published: str = ""


@dataclass(frozen=True)
class Row:
    """One paper.

    Attributes:
        policies: balancers that its figures need.
    """

    name: str
    paper: str
    policies: tuple[str, ...]
    figures: tuple[Figure, ...]
    set_ups: tuple[SetUp, ...]


@dataclass(frozen=True)
class ReorderingAlone(ReLibra):
    """ReLibra's homes without its replicas, for its ablation."""

    def plan(self, view: View) -> StepPlan:
        return super().plan(view).without_replicas()


@dataclass(frozen=True)
class PlacementAlone(RoutePack):
    """RoutePack's homes without its packing: the first of its two steps."""

    def pack(self, view: View, placement: Placement) -> Schedule:
        return view.schedule


VARIANTS: dict[str, Policy] = {"relibra, reordering": ReorderingAlone(), "routepack, placement": PlacementAlone()}

# 1,024 sequences in 32 micro-batches at EP 16; twice as many at EP 32, so that a rank has as many tokens.
_RELIBRA = SetUp("qwen3-30b-a3b", 16, micro_steps=32, mean_length=2048)
_FEPLB = SetUp("glm-4.5-air", 8, micro_steps=8)
_FOREMOE = SetUp("qwen3-30b-a3b", 64, layers=4)
_ULTRAEP = SetUp("deepseek-v3", 64, ranks_per_node=64, layers=4, micro_steps=8)
_ULTRAEP_40 = replace(_ULTRAEP, model="glm-4.5", ranks=40, ranks_per_node=40)
_ROUTEPACK = SetUp("qwen3-30b-a3b", 8)

ROWS = (
    Row(
        "relibra",
        "ReLibra (arXiv 2605.08639)",
        ("static", "eplb_oracle", "relibra", "relibra, reordering", "trimtab", "balanced"),
        (
            Figure(
                "relibra over static", speedup("relibra", "static"), published="1.21 to 1.58x; 1.39x in its ablation"
            ),
            Figure("relibra over eplb_oracle", speedup("relibra", "eplb_oracle"), published="1.06 to 1.21x"),
            Figure("relibra of balanced", of_balanced("relibra"), "%", "90 to 94%"),
            Figure("reordering alone over static", speedup("relibra, reordering", "static"), published="1.15x"),
            Figure("relibra's reordering, of the step", share("relibra", "migration"), "%", "1.4 to 2.1%"),
            Figure("max/mean, static", max_over_mean("static"), "", "above 2.0"),
            Figure("max/mean, relibra", max_over_mean("relibra"), "", "1.00 to 1.08"),
            Figure("trimtab over static", speedup("trimtab", "static")),
            Figure("trimtab of balanced", of_balanced("trimtab"), "%"),
            Figure("trimtab of balanced, planning aside", of_balanced("trimtab", planning=False), "%"),
            Figure("trimtab over relibra", speedup("trimtab", "relibra")),
            Figure("trimtab over relibra, planning aside", speedup("trimtab", "relibra", planning=False)),
        ),
        tuple(
            replace(_RELIBRA, model=model, ranks=ranks)
            for model in ("qwen3-30b-a3b", "glm-4.5-air", "qwen3-235b-a22b")
            for ranks in (16, 32)
        ),
    ),
    Row(
        "feplb",
        "FEPLB (arXiv 2604.19654)",
        ("static", "fastermoe", "feplb", "trimtab", "balanced"),
        (
            Figure("token straggler cut, feplb", straggler_cut("feplb", rows), "%", "51 to 70%"),
            Figure("GEMM straggler cut, feplb", straggler_cut("feplb", product_seconds), "%", "50 to 68%"),
            Figure(
                "token straggler cut, feplb against fastermoe",
                straggler_cut("feplb", rows, "fastermoe"),
                "%",
                "50% at EP 8",
            ),
            Figure("lost in MoE layers, static", lost_in_layers("static"), "%", "18.6% at EP 8"),
            Figure("feplb over static", speedup("feplb", "static")),
            Figure("token straggler cut, trimtab", straggler_cut("trimtab", rows), "%"),
            Figure("trimtab over static", speedup("trimtab", "static")),
        ),
        tuple(replace(_FEPLB, ranks=ranks) for ranks in (2, 4, 8)),
    ),
    Row(
        "foremoe",
        "ForeMoE (arXiv 2606.11867)",
        ("static", "eplb", "foremoe", "trimtab", "balanced"),
        (
            Figure("foremoe over static", speedup("foremoe", "static"), published="up to 1.45x"),
            Figure("foremoe over eplb", speedup("foremoe", "eplb")),
            Figure("foremoe of balanced", of_balanced("foremoe"), "%"),
            Figure("trimtab over static", speedup("trimtab", "static")),
            Figure("trimtab over eplb", speedup("trimtab", "eplb")),
            Figure("trimtab of balanced", of_balanced("trimtab"), "%"),
            Figure("trimtab of balanced, planning aside", of_balanced("trimtab", planning=False), "%"),
            Figure("trimtab over foremoe", speedup("trimtab", "foremoe")),
            Figure("trimtab over foremoe, planning aside", speedup("trimtab", "foremoe", planning=False)),
        ),
        (_FOREMOE, replace(_FOREMOE, model="qwen3-235b-a22b")),
    ),
    Row(
        "ultraep",
        "UltraEP (arXiv 2606.04101)",
        ("static", "ultraep", "trimtab", "balanced"),
        (
            Figure("max/mean, static", max_over_mean("static"), "", "1.30 to 4.01"),
            Figure("max/mean, ultraep", max_over_mean("ultraep"), "", "1.01 to 1.04"),
            Figure("ultraep of balanced", of_balanced("ultraep"), "%", "94.3%"),
            Figure("ultraep over static", speedup("ultraep", "static")),
            Figure("max/mean, trimtab", max_over_mean("trimtab"), ""),
            Figure("trimtab of balanced", of_balanced("trimtab"), "%"),
            Figure("trimtab over ultraep", speedup("trimtab", "ultraep")),
        ),
        tuple(replace(each, equal_terms=equal) for each in (_ULTRAEP_40, _ULTRAEP) for equal in (False, True)),
    ),
    Row(
        "routepack",
        "RoutePack (arXiv 2608.12146)",
        ("static", "routepack, placement", "routepack", "trimtab", "balanced"),
        (
            Figure("placement over static", gain("routepack, placement", "static"), "%", "+8.85%"),
            Figure("placement and packing over static", gain("routepack", "static"), "%", "+14.89%"),
            Figure("routepack of balanced", of_balanced("routepack"), "%"),
            Figure("trimtab over static", gain("trimtab", "static"), "%"),
            Figure("trimtab of balanced", of_balanced("trimtab"), "%"),
        ),
        (_ROUTEPACK, replace(_ROUTEPACK, ranks=16)),
    ),
    Row(
        "laer",
        "LAER-MoE (arXiv 2602.11686)",
        ("static", "laer", "trimtab", "balanced"),
        (
            Figure("laer over static", speedup("laer", "static"), published="1.11 to 1.69x"),
            Figure("laer of balanced", of_balanced("laer"), "%"),
            Figure("trimtab over static", speedup("trimtab", "static")),
            Figure("trimtab of balanced", of_balanced("trimtab"), "%"),
        ),
        (SetUp("mixtral-8x7b", 8, "a100x8"),),
    ),
    Row(
        "llep",
        "LLEP (arXiv 2601.17111)",
        ("static", "llep", "trimtab", "balanced"),
        (
            Figure("experts of a layer, llep over static, best", best_layer("llep", "static"), "x", "up to 5 to 6x"),
            Figure("llep over static", speedup("llep", "static")),
            Figure("llep of balanced", of_balanced("llep"), "%"),
            Figure("trimtab over static", speedup("trimtab", "static")),
            Figure("trimtab of balanced", of_balanced("trimtab"), "%"),
        ),
        (SetUp("gpt-oss-20b", 8), SetUp("gpt-oss-120b", 8)),
    ),
)
