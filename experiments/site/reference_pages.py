"""Pages of the site that come from docstrings and code: Python, command line, metrics, balancers, models, clusters."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import trimtab
from experiments import json_schemas
from experiments.page_tables import markdown_table
from trimtab.api.plan_result import PlanResult
from trimtab.cli.main import COMMANDS
from trimtab.cli.parser import Parser
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.cluster.presets import preset_names, read_preset
from trimtab.figures import described_figures
from trimtab.policies import POLICIES

MADE = "<!-- Generated from the code. -->\n\n"
# Parts of the interface, with their modules; the names are those of `__all__`.
PYTHON = {
    "Traces, plans and simulated steps": ("trimtab",),
    "Observe a run": ("trimtab.observe",),
    "Balance a run": ("trimtab.runtime",),
    "Frameworks": (
        "trimtab.integrations.transformers",
        "trimtab.integrations.megatron",
        "trimtab.integrations.trl",
        "trimtab.integrations.expert_parallel",
    ),
}
# Modules that define names of a package that imports them when they are first used.
LAZY = {"trimtab.integrations.megatron": "trimtab.integrations.megatron.balancing"}


def reference_pages() -> dict[str, str]:
    """Text of each generated page, by its place in the site."""
    made = {
        "python": python_page,
        "command-line": command_page,
        "metrics": metrics_page,
        "json": json_schemas.page,
        "balancers": balancers_page,
        "models-and-clusters": models_page,
    }
    return {f"reference/{name}.md": MADE + page() for name, page in made.items()}


def first_page(readme: str) -> str:
    """The README as the site's first page: links into `docs/` are links of the site, other files are named only."""
    readme = re.sub(r"\]\(docs/([^)]*)\)", r"](\1)", readme)
    return re.sub(r"\[([^\]]*)\]\((?!http|#)((?:\.\./)?[A-Za-z]+(?:\.md|/[^)]*\.(?:py|md)))\)", _outside, readme)


def _outside(link: re.Match[str]) -> str:
    """A link to a file of the repository that is not in the site, as its name; others as they are."""
    path = Path(link[2])
    return link[0] if (Path("docs") / path).exists() else f"{link[1]} (`{path}`)"


def python_page() -> str:
    """Directives of mkdocstrings for every public name."""
    parts = ["# Python", "`import trimtab` loads nothing. `trimtab.runtime` and `trimtab.integrations` need torch."]
    for title, modules in PYTHON.items():
        parts.append(f"## {title}")
        places = (place for module in modules for place in public_names(module))
        parts += [f"::: {place}" for place in sorted(places, key=_order)]
    return "\n\n".join(parts) + "\n"


def _order(place: str) -> tuple[bool, bool]:
    """`Session` first, then functions, then classes."""
    name = place.rpartition(".")[2]
    return name != "Session", name[0].isupper()


def public_names(module: str) -> Iterator[str]:
    """Where each name of a module's `__all__` is defined. The module is read, not imported."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    names: list[str] = []
    places: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            places |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
    if not names:
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    # Constants, and second names of functions.
    assigned = {getattr(node.targets[0], "id", "") for node in tree.body if isinstance(node, ast.Assign)}
    for name in names:
        if name in assigned:
            continue
        place = places.get(name, f"{LAZY.get(module, module)}.{name}")
        while place.count(".") < 3 and (deeper := _reexported(place)):
            place = deeper
        yield place


def _reexported(place: str) -> str:
    """Where a name that a package imports is defined; "" if the package defines it."""
    module, _, name = place.rpartition(".")
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            return f"{node.module}.{name}"
    return ""


def command_page() -> str:
    """All commands with their options."""
    root = Parser(prog="trimtab", description="")
    commands = root.add_subparsers()
    parts = ["# Command line", "`trimtab COMMAND --help` prints the same. Input errors are one line, exit status 2."]
    for name in COMMANDS:
        import_module(f"trimtab.cli.{name}").add(commands)
        if name != "bench":
            parts += _command(commands.choices[name])
    return "\n\n".join(parts) + "\n"


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The section of a command, and those of its parts."""
    yield f"## {parser.prog}"
    yield _plain(parser.description or "")
    parts: list[argparse.ArgumentParser] = []
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parts += action.choices.values()
        elif action.dest not in ("help", "log_level"):
            names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
            value = f" {action.metavar}" if action.option_strings and action.metavar else ""
            rows.append([names + value, _plain(action.help or "")])
    if rows:
        yield re.sub("---:", "---", markdown_table(["option", ""], rows), count=1)
    if examples := getattr(parser, "examples", ()):
        yield "```sh\n" + "\n".join(examples) + "\n```"
    for part in parts:
        yield from _command(part)


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("%%", "%")


def metrics_page() -> str:
    """Figures of plans, of a session, and of observed steps."""
    report = _read_class("runtime/plan_report.py", "PlanReport")
    counters = _read_docstring("runtime/session.py", "Session", "take_metrics").partition("Returns:")[2]
    return (
        "\n\n".join(
            [
                "# Metrics",
                "`max_vio` is max/mean - 1 of rank loads. An *instance* is one layer of one micro-step.",
                "## Of a planned step",
                "`session.report` (`PlanReport`). Those with a name are in `metrics.jsonl` of `recipes.rl`; plugins "
                "log them with the framework's prefix, see [frameworks](../frameworks.md).",
                figure_table(report, "in `metrics.jsonl`"),
                "`report.memory` and `session.memory()` (`RankMemory`): memory of this rank, by owner. `pool_bytes` is "
                "`ring_bytes` and `return_bytes` together.",
                figure_table(_read_class("runtime/plan_report.py", "RankMemory"), "in `metrics.jsonl`"),
                "## Of a session",
                "`session.take_metrics()`, this rank's counters since the last call:",
                figure_table(_read_class("runtime/transfer/counters.py", "Counters"), "in `take_metrics()`"),
                _bullets(counters.partition("; ")[2]),
                "## Of an observed step",
                "See [observe](../observe.md#figures).",
                "## Of `trimtab.plan`",
                figure_table(described_figures(PlanResult), "in JSON"),
            ]
        )
        + "\n"
    )


def figure_table(figures: dict[str, tuple[str, str, str]], keys: str) -> str:
    """Figures of a class of results as a table."""
    rows = [[f"`{name}`", unit, text, f"`{key}`" if key else ""] for name, (unit, text, key) in figures.items()]
    return markdown_table(["figure", "unit", "meaning", keys], rows).replace("---:", "---")


def _bullets(text: str) -> str:
    """Texts of `keys`: meaning; keys: meaning, as a list."""
    text = " ".join(text.split())
    parts = re.split(r"; (?=`)|(?<=\.) (?=Of|If)|(?<=mode `live`): (?=`)", text)
    return "\n".join(f"* {part.rstrip('.')}" for part in parts)


def _read_class(file: str, name: str) -> dict[str, tuple[str, str, str]]:
    """`described_figures` of a class of `runtime/`, which needs torch to be imported: from its source."""
    source = (Path(trimtab.__file__).parent / file).read_text(encoding="utf-8")
    (kind,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {}
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.value or node.target).startswith("measured("):
            assert isinstance(node.value, ast.Call)
            texts = [ast.literal_eval(each) for each in node.value.args]
            key = next((ast.literal_eval(word.value) for word in node.value.keywords if word.arg == "key"), "")
            assert isinstance(node.target, ast.Name)
            found[node.target.id] = (texts[1] if len(texts) > 1 else "", texts[0], key)
    return found


def _read_docstring(file: str, kind: str, method: str) -> str:
    source = (Path(trimtab.__file__).parent / file).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == kind:
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == method:
                    return ast.get_docstring(part) or ""
    raise AssertionError(f"{file} has no {kind}.{method}")


def balancers_page() -> str:
    """All balancers: what they know, where their copies are, and their source."""
    header = ["name", "knows", "copies", "in the node", "moves homes", "", "planning time"]
    rows: list[list[str]] = []
    texts: dict[object, str] = {}
    for name, policy in POLICIES.items():
        traits = policy.traits
        about = inspect.getdoc(type(policy)) or ""
        rows.append([
            f"`{name}`", traits.known_at, traits.copies, "yes" if traits.within_node else "",
            "yes" if traits.relocates else "", _plain(about.split("\n\n")[0].replace("\n", " ")),
            traits.planning.source,
        ])  # fmt: skip
        module = inspect.getmodule(type(policy))
        texts[module] = f"## {name}\n\n{_plain(inspect.getdoc(module) or '')}" if module not in texts else texts[module]
    return (
        "\n\n".join(
            [
                "# Balancers",
                "*Knows*: the latest routing that its decisions see. *In the node*: with its own recipe, copies stay "
                "in the node of their home.",
                markdown_table(header, rows).replace("---:", "---"),
                *texts.values(),
            ]
        )
        + "\n"
    )


def models_page() -> str:
    """Sizes of all models, figures of all clusters, and the source of each."""
    names = preset_names("cluster")
    contents = {name: tomllib.loads(read_preset("cluster", name) or "") for name in names}
    meanings = {name: _plain(text) for name, text in json_schemas.texts_of(ClusterSpec).items()}
    keys = [key for key in contents["h100x8"] if isinstance(contents["h100x8"][key], dict)]
    values = [[f"`{key}`", *(_number(contents[name][key]["value"]) for name in names)] for key in keys]
    parts = [
        "# Models and clusters",
        "[Names, your own config and your own cluster](../clusters.md).",
        "## Models",
        markdown_table(
            ["name", "experts, top-k", "MoE + dense layers", "width, expert's width", "attention", "weights", "active"],
            [_model_row(name) for name in preset_names("model")],
        ),
        "Active weights don't include the embedding. Weights are counted from the sizes, without biases, norms, "
        "multi-token prediction and vision towers. Tests compare them with the published totals, and with the model "
        "that transformers builds.",
        "## Figures of a cluster",
        markdown_table(["figure", "meaning"], [[f"`{key}`", meanings[key]] for key in keys]).replace("---:", "---"),
        markdown_table(["figure", *(f"`{name}`" for name in names)], values),
        "No rate was measured by us on that hardware, except one product on an H100. A source begins with *derived* if "
        "the figure was computed from those of other hardware or from a peak, with *assumed* if no figure supports it.",
    ]
    for name in names:
        sources = [[f"`{key}`", _plain(contents[name][key]["source"])] for key in keys]
        table = markdown_table(["figure", "source"], sources).replace("---:", "---")
        parts += [f"## Sources: {name}", table]
    return "\n\n".join(parts) + "\n"


def _number(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _model_row(name: str) -> list[str]:
    model = ModelSpec.named(name)
    blocks = [
        f"{block.in_moe_layers + block.in_dense_layers} {block.kind}"
        + (f" ({model.reach:,})" if block.kind in ("window", "chunk", "sparse") else "")
        for block in model.attention
    ]
    return [
        f"`{name}`",
        f"{model.num_experts}, {model.top_k}",
        f"{model.moe_layers} + {model.dense_layers}",
        f"{model.hidden_size}, {model.expert_width}",
        ", ".join(blocks) or "full",
        f"{model.parameters / 1e9:.1f} B",
        f"{model.active_parameters / 1e9:.1f} B",
    ]
