"""A headless Chromium that belongs to the machine, for tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser. Skips the test if there is none on PATH."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class OpenPage:
    """A page that is ready, and everything that went wrong on it or left it so far.

    Attributes:
        complaints: console messages, uncaught errors, failed requests, dialogs.
        requests: addresses other than the page's own.
    """

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def pixels(self, selector: str) -> str:
        """What a canvas shows, to compare."""
        return str(self.page.eval_on_selector(selector, "canvas => canvas.toDataURL()"))

    def wait_until_drawn(self) -> None:
        """Wait for the timeline, if the page has one; it is drawn last."""
        if self.page.locator("#step-timeline").count():
            self.page.wait_for_selector("[data-drawn]", state="attached")

    def dismiss(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector)).strip()


@contextmanager
def open_page(
    browser: Any, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light"
) -> Iterator[OpenPage]:
    """Open a file and wait until it can be used."""
    viewport = {"width": width, "height": height}
    context = browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
    # The time is the wall's; a busy machine takes more than the 30 s of Playwright.
    context.set_default_timeout(300_000)
    opened = OpenPage(context.new_page())
    opened.page.on("console", lambda message: opened.complaints.append(message.text))
    opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.page.on("dialog", opened.dismiss)
    opened.page.on("requestfailed", lambda request: opened.complaints.append(f"failed: {request.url}"))
    opened.page.on(
        "request", lambda request: None if request.url == path.as_uri() else opened.requests.append(request.url)
    )
    try:
        opened.page.goto(path.as_uri())
        opened.page.wait_for_selector("[data-ready]", state="attached")
        yield opened
    finally:
        context.close()
