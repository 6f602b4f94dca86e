"""The browser of all tests of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import OpenPage, chromium, open_page
from trimtab.report.html import Page, write_html


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Callable[..., AbstractContextManager[OpenPage]]:
    """Opens the page of a report; its use may cause no complaint and no request."""

    @contextmanager
    def opened_page(report: Page, **settings: Any) -> Iterator[OpenPage]:
        write_html(report, tmp_path / "page.html")
        with open_page(browser, tmp_path / "page.html", **settings) as opened:
            opened.wait_until_drawn()
            yield opened
            assert opened.complaints == []
            assert opened.requests == []

    return opened_page
