"""`python -m experiments.json_schemas`: write docs/schemas/, the JSON schemas of what commands write with --json.

Types are those of results of small traces; texts are those of docstrings.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import trimtab
from trimtab.analysis import analysis, trace_comparison
from trimtab.analysis.balance import Balance, DomainSkew, SizeBalance, Stability
from trimtab.analysis.cost_estimate import CostEstimate, PermutedIds
from trimtab.analysis.fixed_placements import PlacementComparison, PlacementStrategy
from trimtab.analysis.hot_experts import HotExpert, HotExperts, RunCount
from trimtab.analysis.trace_comparison import TraceComparison, TraceFigures
from trimtab.analysis.trace_counts import TraceCounts
from trimtab.api.analyze import AnalysisComparison
from trimtab.api.plan_result import PlanResult
from trimtab.api.simulate import SimulationResult
from trimtab.api.size_rollout import RolloutSizing
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.figures import described_figures
from trimtab.files import write_atomically
from trimtab.simulator import comparison
from trimtab.simulator.sensitivity import Sensitivity
from trimtab.simulator.step import StepSettings
from trimtab.sizing.deployments import Deployment
from trimtab.trace import RoutingTrace, no_route, synthesize

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
Schema = dict[str, Any]
# Objects whose keys are names or numbers of the run.
OPEN = {
    "by_ranks", "policies", "strategies", "step_time_s", "predicted_s", "parts_s", "memory_bytes", "state_bytes",
    "chosen",
}  # fmt: skip
# Those that are not named after their command.
COMMANDS = {"compare": "analyze --compare"}
# Where keys are described: by the key of their object, "" for the whole.
BALANCE = (analysis._balance, Balance)
TEXTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "analyze": {
        "": (TraceCounts, analysis.figures, *BALANCE), "nodes": BALANCE, "by_layer": (analysis.figures, *BALANCE),
        "by_ranks": BALANCE, "by_size": (SizeBalance,), "stability": (Stability,),
        "placements": (PlacementComparison,), "strategies": (PlacementStrategy,),
        "hot_experts": (HotExperts, analysis.figures), "hottest": (HotExpert, analysis.figures), "runs": (RunCount,),
        "domains": (DomainSkew,), "estimate": (CostEstimate, analysis.figures),
        "ids_permuted": (PermutedIds, analysis.figures),
    },
    "compare": {
        "": (TraceComparison, trace_comparison.figures, AnalysisComparison.figures),
        "a": (TraceFigures, trace_comparison._trace), "b": (TraceFigures, trace_comparison._trace),
        "difference": (TraceFigures,),
    },
    "plan": {"": (PlanResult, PlanResult.figures), "cluster": (ClusterSpec,)},
    "rollout": {
        "": (RolloutSizing.figures,),
        "settings": (RolloutSizing.figures,), "deployments": (Deployment, RolloutSizing.figures),
    },
    "simulate": {
        "": (SimulationResult.figures,), "sweep": (SimulationResult.figures,), "policies": (comparison.figures,),
        "settings": (StepSettings, SimulationResult.figures), "cluster": (ClusterSpec,), "model": (ModelSpec,),
        "sensitivity": (Sensitivity,),
    },
}  # fmt: skip


def samples() -> dict[str, list[dict[str, Any]]]:
    """Results of each function that differ in what may be missing."""
    model = replace(ModelSpec.named("qwen3-30b-a3b"), num_experts=16, top_k=4, moe_layers=4, moe_layer_indices=())
    trace = synthesize(num_sequences=24, sequence_length=32, num_layers=2, num_experts=16, top_k=4, zipf=1.5)
    steps = replace(trace, steps=np.repeat([0, 1], 12).astype(np.int32), domains=np.repeat(["a", "b"], 12))
    nodes: dict[str, Any] = {"ranks": 4, "ranks_per_node": 2}
    run = trimtab.Run(model=model, **nodes)
    even_trace = _even(trace)
    ids = even_trace.expert_ids.copy()
    ids[:, 1] = no_route(16)
    known = trimtab.analyze(steps, replace(run, micro_steps=2))
    compared = [
        known,
        *(trimtab.analyze(each, trimtab.Run(**nodes)) for each in (even_trace, replace(even_trace, expert_ids=ids))),
    ]
    results: dict[str, list[Any]] = {
        "analyze": [known, trimtab.analyze(even_trace, trimtab.Run(ranks=4, token_budget=1024))],
        "compare": [known.compare(each) for each in compared] + [each.compare(known) for each in compared],
        "plan": [
            trimtab.plan(steps, replace(run, token_budget=64)),
            trimtab.plan(trace, trimtab.Run(token_budget=64, **nodes), policy="llep"),
        ],
        "rollout": [
            trimtab.size_rollout(steps, trimtab.Run(model=model), gpus=4, gpu_hour=2.0),
            trimtab.size_rollout(trace, trimtab.Run(model=model), gpus=2),
        ],
        "simulate": [
            trimtab.simulate(
                steps,
                replace(run, micro_steps=2).sweep(dispatcher=["rows", "tokens"]),
                policies="eplb,trimtab",
                sensitivity=True,
            ),
            trimtab.simulate(trace, replace(run, token_budget=64), policies="llep"),
        ],
    }
    return {name: [json.loads(json.dumps(each.figures())) for each in found] for name, found in results.items()}


def _even(trace: RoutingTrace) -> RoutingTrace:
    """One step in which all experts have the same tokens."""
    tokens = np.arange(trace.num_tokens)[:, None, None]
    ids = (4 * tokens + np.arange(4)) % 16
    return replace(trace, expert_ids=np.broadcast_to(ids, trace.expert_ids.shape).astype(trace.expert_ids.dtype))


def schemas(by_name: dict[str, list[dict[str, Any]]]) -> dict[str, Schema]:
    """The schema of each function's JSON, by the name that the JSON has in `schema`."""
    made = {}
    for name, found in by_name.items():
        schema = _schema(found[0])
        for other in found[1:]:
            schema = merged(schema, _schema(other))
        title = found[0]["schema"]
        schema["properties"]["schema"] = {"const": title}
        _describe(schema, "", {key: texts_of(*kinds) for key, kinds in TEXTS[name].items()})
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
        made[title] = head | {"description": f"What `trimtab {COMMANDS.get(name, name)} --json` writes."} | schema
    return made


def _schema(value: Any, key: str = "") -> Schema:
    """What is known of the type of a value."""
    if isinstance(value, dict):
        if key in OPEN:
            return {"type": ["object"], "additionalProperties": _of_all(value.values())}
        properties = {name: _schema(each, name) for name, each in value.items()}
        return {"type": ["object"], "properties": properties, "required": sorted(value)}
    if isinstance(value, list):
        return {"type": ["array"], "items": _of_all(value)}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return {"type": [kinds[type(value)]]}


def _of_all(values: Any) -> Schema:
    found: Schema = {}
    for value in values:
        found = merged(found, _schema(value))
    return found


def merged(one: Schema, other: Schema) -> Schema:
    """A schema for what fits one or the other."""
    if not one or not other:
        return one or other
    kinds = {*one["type"], *other["type"]}
    made: Schema = {"type": sorted(kinds - {"integer"} if "number" in kinds else kinds)}
    if "object" in kinds and ("properties" in one or "properties" in other):
        parts = [part.get("properties", {}) for part in (one, other)]
        names = dict.fromkeys([*parts[0], *parts[1]])
        made["properties"] = {name: merged(parts[0].get(name, {}), parts[1].get(name, {})) for name in names}
        required = [set(part["required"]) for part in (one, other) if "required" in part]
        made["required"] = sorted(set.intersection(*required))
    for name in ("additionalProperties", "items"):
        if name in one or name in other:
            made[name] = merged(one.get(name, {}), other.get(name, {}))
    return made


def texts_of(*kinds: Any) -> dict[str, str]:
    """Texts by key: of figures, or of the attributes or keys that docstrings list; later ones replace earlier ones."""
    found: dict[str, str] = {}
    for kind in kinds:
        if kind is PlanResult:
            described = described_figures(kind).values()
            found |= {key: f"{text}{f' [{unit}]' if unit else ''}" for unit, text, key in described if key}
            continue
        # The attributes of a class are indented, the keys that a function's docstring lists are not.
        indent = " " * 4 * isinstance(kind, type)
        pattern = rf"^{indent}(\w[\w, ]*): (.*(?:\n{indent} {{4}}.*)*)"
        lines = re.findall(pattern, inspect.getdoc(kind) or "", re.MULTILINE)
        for names, text in lines:
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def _describe(schema: Schema, key: str, texts: dict[str, dict[str, str]]) -> None:
    """Add texts to the properties of an object, and of all objects in it."""
    for name, part in schema.get("properties", {}).items():
        if text := texts.get(key, {}).get(name):
            part["description"] = text
        _describe(part, name, texts)
    for inner in ("items", "additionalProperties"):
        if inner in schema:
            _describe(schema[inner], key, texts)


def page() -> str:
    """The keys of all stored schemas as tables."""
    parts = [
        "# JSON",
        "What `--json FILE` and `--json -` write; `result.figures()` is the same in Python. A key that is added does "
        "not change the schema's name; one that is removed, or means something else, does.",
    ]
    for file in sorted(FOLDER.glob("*.schema.json")):
        schema = json.loads(file.read_text(encoding="utf-8"))
        parts += [f"## {schema['title']}", f"{schema['description']} [Schema](../schemas/{file.name})."]
        rows = [f"| `{path}` | {kind} | {text} |" for path, kind, text in _rows(schema, "")]
        parts.append("\n".join(["| key | type | |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _rows(schema: Schema, path: str) -> Iterator[tuple[str, str, str]]:
    for name, part in schema.get("properties", {}).items():
        place = f"{path}.{name}" if path else name
        text = part.get("description", "").replace("|", "\\|").replace("<", "&lt;")
        yield place, " or ".join(part.get("type", ["string"])), text
        # A case of a sweep has figures as the first one has.
        if not place.startswith("sweep[].") or ("properties" not in part and "additionalProperties" not in part):
            yield from _rows(part, place)
    for inner, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if inner in schema:
            yield from _rows(schema[inner], path + mark)


if __name__ == "__main__":
    for title, schema in schemas(samples()).items():
        write_atomically(FOLDER / f"{title}.schema.json", json.dumps(schema, indent=1) + "\n")
