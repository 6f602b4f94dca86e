"""The gallery of the site: pages that commands write from `examples/sample.parquet`, made when the site is built."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from trimtab.errors import InputError

ROOT = Path(__file__).parents[2]
SAMPLE = "examples/sample.parquet"
# What each page shows, by its name, and the options of the command of that name.
PAGES = {
    "analyze": ("what imbalance costs on 8 ranks, and in which layers", "--ranks 8"),
    "simulate": ("the step time of each balancer", "--ranks 8 --step-tokens 500K --recompute-granularity full"),
    "advise": (
        "what pays, with intervals and money",
        "--ranks 8 --step-tokens 500K --recompute-granularity full --gpu-hour 2.50",
    ),
}
INTRODUCTION = f"""# Gallery

Pages as the commands write them: each is one file that works offline. Click on a chart's bars and cells for figures.

They are about `{SAMPLE}`, a trace that comes with the repository, so that you can try any command without
a dump of your own. `python -m experiments.sample_trace` recorded it: `recipes.rl` trains a small model of 8 MoE
layers with 32 experts, top-4. gpt-oss-20b has as many, and seconds are those of gpt-oss-20b with this routing.
"""


def command(name: str) -> str:
    """The command of a page, as a user writes it."""
    return f"trimtab {name} {SAMPLE} {PAGES[name][1]} --html out/{name}.html"


def gallery() -> dict[str, str]:
    """The gallery's page and the pages that it links to, by their places in the site.

    Raises:
        InputError: if a command of the gallery fails.
    """
    lines = [INTRODUCTION]
    for name, (shows, _) in PAGES.items():
        lines.append(f"## [{name}](gallery/{name}.html)\n\n{shows.capitalize()}.\n\n```sh\n{command(name)}\n```\n")
    return {"gallery.md": "\n".join(lines), **{f"gallery/{name}.html": _page(name) for name in PAGES}}


def _page(name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        words = [name, SAMPLE, *shlex.split(PAGES[name][1]), "--html", str(page)]
        done = subprocess.run([sys.executable, "-m", "trimtab", *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"{command(name)}: {done.stderr.strip()}")
        return page.read_text(encoding="utf-8")
