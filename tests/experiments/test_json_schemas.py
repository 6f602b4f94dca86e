"""Schemas of JSON are those of present results; results of other settings and of earlier versions fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trimtab
from experiments.json_schemas import FOLDER, _schema, merged, page, samples, schemas
from trimtab.trace import synthesize

FIXTURES = Path(__file__).parents[1] / "fixtures" / "0.1.0"

# It plans and simulates.
pytestmark = pytest.mark.slow


def stored(title: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / f"{title}.schema.json").read_text(encoding="utf-8")))


def fits(value: Any, schema: dict[str, Any], *, whole: bool = True) -> bool:
    """A plain reading of the parts of JSON schema that the files use; without `whole` keys may be missing."""
    if "const" in schema:
        return bool(value == schema["const"])
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object"}
    kind = kinds.get(type(value), "array")
    if schema and kind not in schema["type"] and not (kind == "integer" and "number" in schema["type"]):
        return False
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        return (not whole or value.keys() >= {*schema.get("required", ())}) and all(
            fits(each, properties.get(name, others), whole=whole) for name, each in value.items()
        )
    return not isinstance(value, list) or all(fits(each, schema.get("items", {}), whole=whole) for each in value)


def test_stored_schemas_are_those_of_present_results() -> None:
    found = samples()
    made = schemas(found)
    assert {file.name for file in FOLDER.iterdir()} == {f"{title}.schema.json" for title in made}
    for results in found.values():
        for result in results:
            assert fits(result, stored(result["schema"]))
            assert not fits(result | {"ranks": "4", "step": "4", "settings": []}, stored(result["schema"]))
            assert not fits(dict(list(result.items())[:-2]), stored(result["schema"]))
    for title, schema in made.items():
        assert stored(title) == schema, "run python -m experiments.json_schemas"


@pytest.mark.parametrize("name", ["analyze", "simulate"])
def test_results_of_version_0_1_0_fit_but_for_keys_that_were_added(name: str) -> None:
    result = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    assert fits(result, stored(result["schema"]), whole=False)


def test_other_settings_fit() -> None:
    trace = synthesize(num_sequences=8, sequence_length=16, num_layers=1, num_experts=4, top_k=1, zipf=0.0)
    for result in (
        trimtab.analyze(trace, trimtab.Run(ranks=1)),
        trimtab.plan(trace, trimtab.Run(ranks=2, slots=0, token_budget=64)),
    ):
        figures = json.loads(json.dumps(result.figures()))
        assert fits(figures, stored(figures["schema"]))


def test_merged_schemas_fit_both() -> None:
    values = [{"a": 1, "b": None}, {"a": 0.5, "c": [{"d": 1}, {}]}]
    one, other = map(_schema, values)
    schema = merged(one, other)
    assert all(fits(value, schema) for value in values)
    assert schema["required"] == ["a"]
    assert schema["properties"]["a"]["type"] == ["number"]
    assert not fits({}, schema)
    assert not fits({"a": "1"}, schema)


def test_the_page_has_every_key_once() -> None:
    text = page()
    assert text.count("| `policies.*.step_time_s` | number | mean of the simulated steps. |") == 1
    assert "| `sweep[].policies` | object |" in text
    assert "sweep[].policies.*" not in text
    assert "| `by_layer[].expert_time_lost` | number | part of expert time for which a rank is idle" in text
