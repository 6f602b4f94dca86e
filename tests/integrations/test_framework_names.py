"""Names of frameworks that plugins use: those of the source in a folder, checked when a plugin is installed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from unittest import mock

import pytest

from helpers.framework_signatures import parameters_in
from trimtab.errors import InputError
from trimtab.framework_names import check_names
from trimtab.integrations import nemo_rl, skyrl
from trimtab.integrations.dry_replay import MEGATRON_NAMES
from trimtab.integrations.miles import MilesPlugin
from trimtab.integrations.ms_swift import MsSwiftPlugin
from trimtab.integrations.roll import WORKERS, RollPlugin
from trimtab.integrations.slime import SlimePlugin

PLUGINS: dict[str, tuple[Sequence[str], str]] = {
    "slime": (SlimePlugin.names, SlimePlugin.fits),
    "miles": (MilesPlugin.names, MilesPlugin.fits),
    "roll": ((*RollPlugin.names, *(f"{module}:ActorWorker" for module in WORKERS.values())), RollPlugin.fits),
    "ms_swift": (MsSwiftPlugin.names, MsSwiftPlugin.fits),
    "nemo_rl": ((*nemo_rl.NAMES, *nemo_rl.WORKER_NAMES), nemo_rl.FITS),
    "skyrl": (skyrl.NAMES + skyrl.WORKER_NAMES + skyrl.LAYOUT_NAMES, skyrl.FITS),
}
"""By package: the names that its plugin uses, and the versions that it fits."""


@pytest.mark.parametrize("package", PLUGINS)
def test_plugins_use_names_of_the_source(package: str) -> None:
    folder, (names, fits) = os.environ.get(package.upper(), ""), PLUGINS[package]
    if not folder:
        pytest.skip(f"needs the source of {fits}: {package.upper()}=folder")
    for line in names:
        name, _, parameters = line.rstrip(")").partition("(")
        assert set(filter(None, parameters.split(", "))) <= set(parameters_in(folder, name) or ()), line


def test_names_of_megatron_are_those_of_the_installed_version() -> None:
    pytest.importorskip("megatron.core")
    check_names(MEGATRON_NAMES, fits="Megatron-core 0.16")


class Replay:
    kept = None

    def __init__(self) -> None:
        self.index = 0


def test_what_is_missing_is_named_with_the_versions_that_fit() -> None:
    module = ModuleType("framework_of_test")
    module.Replay, module.step = Replay, lambda model, *, batch: None  # type: ignore[attr-defined]
    module.any_step = lambda model, **options: None  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, framework_of_test=module):
        check_names(
            [
                "framework_of_test:step(batch, model)", "framework_of_test:any_step(batch)",
                "framework_of_test:Replay.index", "framework_of_test:Replay.kept", "framework_of_test:step",
            ],
            fits="framework 1.0",
        )  # fmt: skip
        for name, problem in {
            "framework_of_test:other": "framework_of_test has no other",
            "framework_of_test:Replay.stage": "framework_of_test has no Replay.stage",
            "framework_of_test:step(size)": "framework_of_test:step has no parameter size",
            "no_framework.model:step": "no_framework.model can't be imported: No module named 'no_framework'",
        }.items():
            with pytest.raises(InputError, match=f"^{re.escape(problem)}; .* fits framework 1.0$"):
                check_names([name], fits="framework 1.0")
        with pytest.raises(InputError, match=r"has no other \(1 more\); "):
            check_names(["framework_of_test:other", "framework_of_test:another"], fits="framework 1.0")
