"""Published figures of papers, and the set-ups in which the same figures are simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.papers.measures import (
    Measure,
    best_layer,
    buffer,
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
        model, cluster: names of presets.
        ranks: of the group.
        ranks_per_node: the cluster's by default; `ranks` for a rack in which all ranks have NVLink.
        layers: simulated MoE layers. The rest of the model is scaled in proportion.
        micro_steps: of a step.
        tokens: mean tokens per rank in a micro-step.
        mean_length, longest: mean and largest tokens of a sequence.
        slots: slots per rank.
        equal_terms: same homes, schedule and slots for all balancers; else each uses its authors' settings.
        steeper: factor of the presets' `zipf`.
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
    steeper: float = 1.0

    @property
    def sequences(self) -> int:
        return self.ranks * self.micro_steps * self.tokens // self.mean_length

    @property
    def title(self) -> str:
        more = (
            f"{', equal terms' if self.equal_terms else ''}{f', {self.steeper:g} x skew' if self.steeper != 1 else ''}"
        )
        return f"{self.model}, EP {self.ranks}{more}"


@dataclass(frozen=True)
class Figure:
    """A figure that is computed in every set-up of a row.

    Attributes:
        title: first cell of its line.
        measure: computes it.
        style: unit: `x` for a ratio of step times, `%` for a fraction, `` for a plain number.
        published: the paper's value as text; empty if it has none.
    """

    title: str
    measure: Measure
    style: str = "x"
    published: str = ""


def over(name: str, other: str, published: str = "", *, planning: bool = True) -> Figure:
    """Step time of `other` divided by that of `name`."""
    title = f"{name} over {other}{'' if planning else ', planning aside'}"
    return Figure(title, speedup(name, other, planning=planning), published=published)


def of_ideal(name: str, published: str = "", *, planning: bool = True) -> Figure:
    """Step time of the ideally balanced run divided by that of `name`."""
    title = f"{name} of balanced{'' if planning else ', planning aside'}"
    return Figure(title, of_balanced(name, planning=planning), "%", published)


def imbalance(name: str, published: str = "") -> Figure:
    """max/mean of rank loads."""
    return Figure(f"max/mean, {name}", max_over_mean(name), "", published)


@dataclass(frozen=True)
class Row:
    """One paper.

    Attributes:
        name: of the row in options and JSON.
        paper: its title.
        policies: names of the balancers that its figures need.
        figures: lines of its table.
        set_ups: columns of its table.
    """

    name: str
    paper: str
    policies: tuple[str, ...]
    figures: tuple[Figure, ...]
    set_ups: tuple[SetUp, ...]


@dataclass(frozen=True)
class ReorderingAlone(ReLibra):
    """ReLibra's homes without its replicas, as in the paper's ablation."""

    def plan(self, view: View) -> StepPlan:
        return super().plan(view).without_replicas()


@dataclass(frozen=True)
class PlacementAlone(RoutePack):
    """RoutePack's homes without its packing."""

    def pack(self, view: View, placement: Placement) -> Schedule:
        return view.schedule


VARIANTS: dict[str, Policy] = {"relibra, reordering": ReorderingAlone(), "routepack, placement": PlacementAlone()}


# 1,024 sequences in 32 micro-batches: 32 in each, at EP 64 as many as ranks. More skew than the presets' model has, so
# that max/mean can be as high as published.
def _relibra(model: str, ranks: int, steeper: float = 1.5) -> SetUp:
    sequences = max(32, ranks)
    return SetUp(model, ranks, micro_steps=32, tokens=sequences * 2048 // ranks, mean_length=2048, steeper=steeper)


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
            over("relibra", "static", "1.21 to 1.58x; 1.39x in its ablation"),
            over("relibra", "eplb_oracle", "1.06 to 1.21x"),
            of_ideal("relibra", "90 to 94%"),
            Figure("reordering alone over static", speedup("relibra, reordering", "static"), published="1.15x"),
            Figure("relibra's reordering, of the step", share("relibra", "migration"), "%", "1.4 to 2.1%"),
            imbalance("static", "above 2.0"),
            imbalance("relibra", "1.00 to 1.08"),
            Figure("relibra's replica buffer, of a rank's parameters", buffer("relibra"), "%", "0.13 to 1.62%"),
            over("trimtab", "static"),
            of_ideal("trimtab"),
            of_ideal("trimtab", planning=False),
            over("trimtab", "relibra"),
            over("trimtab", "relibra", planning=False),
        ),
        (
            *(_relibra("qwen3-30b-a3b", ranks) for ranks in (8, 16, 32, 64)),
            *(_relibra(model, ranks) for model in ("glm-4.5-air", "qwen3-235b-a22b") for ranks in (16, 32)),
            *(_relibra("qwen3-30b-a3b", ranks, steeper=1) for ranks in (16, 32)),
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
            over("feplb", "static"),
            Figure("token straggler cut, trimtab", straggler_cut("trimtab", rows), "%"),
            over("trimtab", "static"),
        ),
        tuple(replace(_FEPLB, ranks=ranks) for ranks in (2, 4, 8)),
    ),
    Row(
        "foremoe",
        "ForeMoE (arXiv 2606.11867)",
        ("static", "eplb", "foremoe", "trimtab", "balanced"),
        (
            over("foremoe", "static", "up to 1.45x"),
            over("foremoe", "eplb"),
            of_ideal("foremoe"),
            over("trimtab", "static"),
            over("trimtab", "eplb"),
            of_ideal("trimtab"),
            of_ideal("trimtab", planning=False),
            over("trimtab", "foremoe"),
            over("trimtab", "foremoe", planning=False),
        ),
        (_FOREMOE, replace(_FOREMOE, model="qwen3-235b-a22b")),
    ),
    Row(
        "ultraep",
        "UltraEP (arXiv 2606.04101)",
        ("static", "ultraep", "trimtab", "balanced"),
        (
            imbalance("static", "1.30 to 4.01"),
            imbalance("ultraep", "1.01 to 1.04"),
            of_ideal("ultraep", "94.3%"),
            over("ultraep", "static"),
            imbalance("trimtab"),
            of_ideal("trimtab"),
            over("trimtab", "ultraep"),
        ),
        tuple(replace(each, equal_terms=equal) for each in (_ULTRAEP_40, _ULTRAEP) for equal in (False, True)),
    ),
    Row(
        "routepack",
        "RoutePack (arXiv 2608.12146)",
        ("static", "routepack, placement", "routepack", "trimtab", "balanced"),
        (
            Figure(
                "placement over static", gain("routepack, placement", "static"), "%", "+3.80% (Tiny), +10.50% (Flash)"
            ),
            Figure(
                "placement and packing over static", gain("routepack", "static"), "%", "+8.85% (Tiny), +14.89% (Flash)"
            ),
            of_ideal("routepack"),
            Figure("trimtab over static", gain("trimtab", "static"), "%"),
            of_ideal("trimtab"),
        ),
        (_ROUTEPACK, replace(_ROUTEPACK, ranks=16)),
    ),
    Row(
        "laer",
        "LAER-MoE (arXiv 2602.11686)",
        ("static", "laer", "trimtab", "balanced"),
        (
            over("laer", "static", "1.11 to 1.69x"),
            of_ideal("laer"),
            over("trimtab", "static"),
            of_ideal("trimtab"),
        ),
        (SetUp("mixtral-8x7b", 8, "a100x8"),),
    ),
    Row(
        "llep",
        "LLEP (arXiv 2601.17111)",
        ("static", "llep", "trimtab", "balanced"),
        (
            Figure("experts of a layer, llep over static, best", best_layer("llep", "static"), "x", "up to 5 to 6x"),
            over("llep", "static"),
            of_ideal("llep"),
            over("trimtab", "static"),
            of_ideal("trimtab"),
        ),
        (SetUp("gpt-oss-20b", 8), SetUp("gpt-oss-120b", 8)),
    ),
)
