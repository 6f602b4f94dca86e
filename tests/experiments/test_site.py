"""The generated pages have every command, option and public name, and links of Markdown files lead to files."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest

from experiments.site import gallery as site_gallery
from experiments.site.reference_pages import PYTHON, first_page, public_names, reference_pages
from trimtab.cli.main import COMMANDS
from trimtab.errors import InputError
from trimtab.policies import POLICIES

ROOT = Path(__file__).parents[2]
FILES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/README.md")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_to_files(file: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link, place in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = (file.parent / link).resolve() if link else file
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if place else []
        assert not place or place in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}, (
            place
        )


def test_the_first_page_has_the_links_of_the_site() -> None:
    text = "[a](docs/gpu.md#here) ![b](docs/idea.svg) [c](CONTRIBUTING.md) [d](https://x.org/y.md) [e](#f)"
    shown = "[a](gpu.md#here) ![b](idea.svg) c (`CONTRIBUTING.md`) [d](https://x.org/y.md) [e](#f)"
    assert first_page(text) == shown


def test_commands_and_options_are_shown() -> None:
    page = reference_pages()["reference/command-line.md"]
    for command in (*(COMMANDS.keys() - {"bench", "trace"}), "trace import", "trace synth"):
        assert f"## trimtab {command}\n" in page
    section = page.partition("## trimtab trace import")[2].partition("\n## ")[0]
    assert "| `--num-experts` N | " in section


def test_every_public_name_is_shown() -> None:
    page = reference_pages()["reference/python.md"]
    for module in (module for modules in PYTHON.values() for module in modules):
        places = list(public_names(module))
        missing = {*getattr(import_module(module), "__all__", ())} - {place.rpartition(".")[2] for place in places}
        assert missing <= {"SUPPORTED_MODEL_TYPES", "share_experts"}
        for place in places:
            home, _, name = place.rpartition(".")
            found = getattr(import_module(home), name)
            assert not isinstance(found, type | FunctionType) or found.__module__ == home
            assert f"::: {place}\n" in page


def test_every_balancer_is_shown() -> None:
    page = reference_pages()["reference/balancers.md"]
    assert all(f"| `{name}` | {policy.traits.known_at} |" in page for name, policy in POLICIES.items())


def test_counters_of_a_session_are_shown() -> None:
    page = reference_pages()["reference/metrics.md"]
    for counter in ("transfer/exposed_s", "moe/late_micro_steps", "moe/abandoned_backwards"):
        assert f"`{counter}`" in page


def test_the_gallery_has_pages_of_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.site.gallery.PAGES", {"analyze": site_gallery.PAGES["analyze"]})
    pages = site_gallery.gallery()
    assert site_gallery.command("analyze") in pages["gallery.md"]
    linked = re.findall(r"\]\((gallery/[^)]*)\)", pages["gallery.md"])
    assert linked == ["gallery/analyze.html"]
    assert "examples/sample.parquet" in pages["gallery/analyze.html"]


def test_a_failing_command_of_the_gallery_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.site.gallery.PAGES", {"analyze": ("nothing", "--ranks 7")})
    with pytest.raises(InputError, match=r"trimtab analyze examples/sample.parquet --ranks 7 .*32 experts"):
        site_gallery.gallery()
