"""`Case`: one random training loop whose results equal those of one process. A line of text says which.

A dimension is one line of `DIMENSIONS`: its values, and the options that each sets. Those that `Options` does not have
are arguments of the session.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from helpers.accelerator import LAZY
from helpers.loop import RUNS, Options
from helpers.moe_model import ALL_LISTS

Values = dict[str, dict[str, Any]]

# The first value of each is the usual one, and not named in a case's line.
DIMENSIONS: dict[str, Values] = {
    "mode": {"plan": {}} | {mode: {"mode": mode} for mode in ("static", "shadow", "off")}
    | {policy: {"mode": "live", "policy": policy} for policy in ("quota", "feplb")},
    "planner": {name: {"planner": name} for name in ("random", "own", "sequences", "micro-steps", "in time", "late")},
    "ranks": {
        "2": {}, "3": {"world": 3}, "2 groups": {"world": 4, "groups": 2},
        "scattered": {"world": 3, "scattered": True},
        "2 scattered groups": {"world": 4, "groups": 2, "scattered": True},
    },
    "experts": {str(count): {"per_rank": count} for count in (2, 1, 3, 5)},
    "top k": {str(count): {"top_k": count} for count in (2, 1, 3)},
    "tensors": {
        "stacks": {}, "lists": {"lists": ALL_LISTS}, "both": {"lists": ("down",)}, "transposed": {"transposed": True},
    },
    "precision": {
        "float64": {}, "float32": {"dtype": torch.float32, "tolerance": 1e-5},
        "float64 over float32": {"compute_dtype": torch.float32, "tolerance": 1e-5},
        "float32 over bfloat16": {"dtype": torch.float32, "compute_dtype": torch.bfloat16, "tolerance": 0.05},
        "bfloat16": {"dtype": torch.bfloat16, "tolerance": 0.05},
    },
    "slots": {"1 or 2": {}, "0": {"slots_per_rank": 0}, "4": {"slots_per_rank": 4}, "auto": {"slots_per_rank": "auto"}},
    "paths": {"both": {}, "message": {"paths": "message"}, "one-sided": {"one_sided": True}},
    "rows": {
        "known": {}, "unknown": {"rows": "unknown"}, "completed": {"rows": "unknown", "completed": True},
        "id twice": {"rows": "twice"}, "unread": {"rows": "unread"}, "deviating": {"rows": "deviates"},
    },
    "padding": {"none": {}, "some": {"padded": True}},
    "blocks": {"plain": {}} | {run: {"runs": (run, f"nested {run}")} for run in (RUNS[1], RUNS[3])}
    | {RUNS[2]: {"runs": RUNS[2:3]}, "experts": {"runs": RUNS[6:]}, "function": {"checkpointed_function": True}},
    "order": {name: {"order": name} for name in ("one by one", "1F1B", "interleaved", "backwards last", "any")},
    "recompute": {"none": {}, "first": {"recomputes": "first"}, "in inference mode": {"recomputes": "inference"}},
    "repeats": {"none": {}} | {name: {"repeats": name} for name in ("forwards", "backwards")},
    "frozen": {"none": {}} | {name: {"frozen": name} for name in ("some layers", "down", "experts", "front")},
    "event": {"none": {}} | {
        name: {"event": name} for name in ("live", "one rank", "zero", "forward fails", "backward fails")
    },
    "between": {"nothing": {}} | {name: {"between": name} for name in (
        "suspend", "reload", "other ranks", "distributed checkpoint", "other session", "other optimizer",
        "other memory", "write", "other weights", "renumber",
    )},
    "optimizer": {"AdamW": {}, "SGD": {"sgd": True}},
    "dense": {"replicated": {}, "FSDP2": {"sharded": True}},
    "dispatcher": {"own": {}, "plain": {"plain_dispatcher": True}},
    "threads": {"one": {}, "one a step": {"threads": "steps"}, "backwards": {"threads": "backwards"}},
    "device": {"CPU": {}} | {
        ways: {"ways": ways} for ways in ("thread", "thread late", "serial peers")
    } | {LAZY: {"ways": LAZY, "steps": 1}},
    "weights": {"sampled": {}, "trusted": {"verify_weights": False}},
}  # fmt: skip

LIVE = {"quota", "feplb"}
DEVICES = {*DIMENSIONS["device"]} - {"CPU", "thread"}
LATE = {LAZY}
OTHERS: dict[str, set[str]] = {name: {*[*values][1:]} for name, values in DIMENSIONS.items()}
# Values of two dimensions that exclude each other.
EXCLUDED: list[tuple[str, set[str], str, set[str]]] = [
    # A plan is of known routes, and live routing of none.
    ("mode", LIVE, "planner", OTHERS["planner"]),
    ("mode", LIVE, "rows", OTHERS["rows"]),
    ("mode", LIVE, "dispatcher", {"plain"}),
    ("mode", LIVE, "slots", {"0"}),
    ("mode", OTHERS["mode"], "planner", {"in time", "late"}),
    ("rows", {"unread"}, "planner", {"sequences"}),
    ("rows", {"completed"}, "planner", {"random"}),
    ("rows", {"completed"}, "mode", {"shadow", "off"}),
    # Routers choose other experts where results are rounded.
    ("precision", OTHERS["precision"], "mode", LIVE),
    ("precision", OTHERS["precision"], "rows", {"unknown", "completed", "id twice", "unread"}),
    ("precision", OTHERS["precision"], "event", {"live"}),
    ("precision", OTHERS["precision"], "between", {"other weights"}),
    ("precision", OTHERS["precision"], "order", {"any"}),
    ("mode", LIVE, "threads", {"one a step"}),
    # A thread counts graph nodes from 0, as the one of the step before did.
    ("event", {"live"}, "threads", {"one a step"}),
    # Simulated devices know no writes of users at any time, and no checkpoints.
    ("device", DEVICES, "order", {"any"}),
    ("device", LATE, "between", {"distributed checkpoint", "other ranks"}),
    # DTensors have shards, which other actions do not know.
    ("dense", {"FSDP2"}, "between", OTHERS["between"] - {"suspend", "other session", "renumber"}),
    ("dense", {"FSDP2"}, "order", {"any"}),
    ("dense", {"FSDP2"}, "optimizer", {"SGD"}),
    ("dense", {"FSDP2"}, "device", DEVICES),
    ("dense", {"FSDP2"}, "recompute", {"in inference mode"}),
    # After an error its parameters stay whole.
    ("dense", {"FSDP2"}, "event", {"forward fails", "backward fails"}),
    ("paths", {"one-sided"}, "device", DEVICES),
    # Late compute is slow to simulate, and that of one thread, without inference mode.
    ("device", LATE, "recompute", {"in inference mode"}),
    ("device", LATE, "threads", OTHERS["threads"]),
    ("device", LATE, "ranks", OTHERS["ranks"]),
    # Its collectives are not simulated.
    ("device", LATE, "dispatcher", {"plain"}),
]


@dataclass(frozen=True)
class Case:
    """A random training loop.

    Attributes:
        seed: of everything random.
        chosen: values of dimensions, but for usual ones.
    """

    seed: int
    chosen: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, seed: int, **chosen: str) -> Case:
        """A case by names of dimensions, with `_` for blanks."""
        return cls.parse(", ".join([str(seed), *(f"{name.replace('_', ' ')}: {v}" for name, v in chosen.items())]))

    @classmethod
    def parse(cls, line: str) -> Case:
        """The case of a line."""
        seed, *parts = line.split(", ")
        given = dict(part.split(": ") for part in parts)
        unknown = [name for name, value in given.items() if value not in DIMENSIONS.get(name, {})]
        assert not unknown, unknown
        named = ((name, given.get(name, next(iter(values)))) for name, values in DIMENSIONS.items())
        return cls(int(seed), tuple((name, value) for name, value in named if value != next(iter(DIMENSIONS[name]))))

    def __str__(self) -> str:
        return ", ".join([str(self.seed), *(f"{name}: {value}" for name, value in self.chosen)])

    @property
    def options(self) -> Options:
        """What the values set."""
        return self.options_with()

    def options_with(self, **others: Any) -> Options:
        """What the values set, but for some."""
        options: dict[str, Any] = {}
        for name, value in self.chosen:
            options |= DIMENSIONS[name][value]
        return Options.of(**options | others)


# All values of all dimensions by number, and whether two of them may occur together, as values of two dimensions.
VALUES = [(name, value) for name, values in DIMENSIONS.items() for value in values]
NUMBERS = {each: number for number, each in enumerate(VALUES)}
_OF = np.array([[*DIMENSIONS].index(name) for name, _ in VALUES])


def pairs() -> np.ndarray:
    """`[V, V]` bool, values of two dimensions that go together."""
    pairs_VV = _OF[:, None] != _OF
    for one, firsts, other, seconds in EXCLUDED:
        for first, second in itertools.product(firsts, seconds):
            places = NUMBERS[one, first], NUMBERS[other, second]
            pairs_VV[places] = pairs_VV[places[::-1]] = False
    return pairs_VV


def draw(seed: int) -> list[Case]:
    """Random cases in which every pair of values of two dimensions occurs."""
    rng, possible_VV, cases = np.random.default_rng(seed), pairs(), list[Case]()
    missing_VV = possible_VV.copy()
    while missing_VV.any():
        tried = []
        for _ in range(20):
            # A pair that is missing, and then for each dimension the value with most missing pairs, or the usual one.
            chosen = [int(each) for each in np.argwhere(missing_VV)[0]]
            for dimension in rng.permutation(np.setdiff1d(np.arange(len(DIMENSIONS)), _OF[chosen])):
                values = np.flatnonzero((dimension == _OF) & possible_VV[:, chosen].all(axis=1))
                counts = missing_VV[values][:, chosen].sum(axis=1)
                chosen.append(int(values[(counts + rng.random(len(values))).argmax() if counts.any() else 0]))
            tried.append((int(missing_VV[np.ix_(chosen, chosen)].sum()), sorted(chosen)))
        _, chosen = max(tried)
        missing_VV[np.ix_(chosen, chosen)] = False
        cases.append(Case.of(int(rng.integers(1 << 20)), **dict(VALUES[each] for each in chosen)))
    return cases
