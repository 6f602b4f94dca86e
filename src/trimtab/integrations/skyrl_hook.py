"""Ray's setup hook of SkyRL's processes: they make Trimtab's worker class of the policy. It runs in all of them, those
of the generation too, so that it imports nothing until SkyRL's worker is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WORKERS = "skyrl.backends.skyrl_train.workers.megatron.megatron_worker"
REPLACEMENT = "trimtab.integrations.skyrl_worker"


def replace_worker_when_imported() -> None:
    """Import `REPLACEMENT`, which sets `PolicyWorker` of `WORKERS`, as soon as `WORKERS` has been imported."""
    if WORKERS in sys.modules:
        import_module(REPLACEMENT)
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds `WORKERS` as the other finders do, once."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != WORKERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            plain = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                plain(module)
                import_module(REPLACEMENT)

            loader.exec_module = exec_module
        return spec
