"""`python -m experiments.gpu_tables FILE`: write the measured tables of docs/gpu.md.

FILE has the figures of `trimtab doctor --gpu --full --json FILE`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from experiments.page_tables import markdown_table, replace_tables
from trimtab.report.number_text import seconds

PAGE = Path("docs/gpu.md")


def blocks(figures: dict[str, Any]) -> dict[str, str]:
    """The tables, by name."""
    (stage,) = [stage for stage in figures["stages"] if stage["name"] == "megatron"]
    found = [finding["figures"] for finding in stage["findings"]]
    return {
        "layers": markdown_table(*_layers([each for each in found if "case" in each])),
        "products": markdown_table(*_products([each for each in found if "case" not in each])),
    }


def _layers(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "tokens", "max/mean", "Megatron", "planned", "ratio", "host, Megatron", "host, planned"]
    return header, [
        [
            each["case"]["model"]["name"],
            f"{each['case']['tokens']:,}",
            f"{each['max_over_mean_before']:.2f}",
            seconds(each["plain_s"]),
            seconds(each["planned_s"]),
            f"{each['ratio']:.2f}x",
            seconds(each["plain_host_s"]),
            seconds(each["planned_host_s"]),
        ]
        for each in found
    ]


def _products(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "tokens", "experts", "one product", "one after the other", "difference"]
    return header, [
        [
            each["model"],
            f"{each['tokens']:,}",
            f"{each['homes']} + {each['replicas']}",
            seconds(each["one_s"]),
            seconds(each["two_s"]),
            seconds(each["two_s"] - each["one_s"]),
        ]
        for each in found
    ]


if __name__ == "__main__":
    replace_tables(blocks(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), PAGE)
