"""`WorkerPlugin`: balance in frameworks whose training processes are made of a worker class that Trimtab replaces."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from trimtab.integrations.framework_names import check_names
from trimtab.integrations.framework_options import VARIABLE
from trimtab.integrations.megatron.option_tables import names, refusals
from trimtab.integrations.options import PluginOptions
from trimtab.integrations.plugin_report import first_line, print_on_first_rank, step_figures
from trimtab.integrations.schedule import MicroBatchRoutes, ScheduleAdapter

_NO_IDS = np.empty((0, 0, 0), np.int16)


class SlicedRoutes(NamedTuple):
    """What the framework's own code gives the routers of this rank for a micro-batch of n tokens.

    Attributes:
        layers: the ids `[n, K]` of each MoE layer of this rank; negative where the router is to choose.
        is_read: `[n]`, whether something uses the output of a token; None if that is not known.
    """

    layers: Sequence[torch.Tensor]
    is_read: torch.Tensor | None


class WorkerPlugin(ABC):
    """The plugin in one training process. Names of the framework are checked when it is made.

    Passes in which the framework replays recorded routing are planned; in mode `live` all passes of the model are.
    Experts keep their homes.

    Attributes:
        package, fits: the framework's package, and its versions for which the plugin was written.
        names: names of the framework that the training process uses, see `check_names`.
        module: the module that has the name of Megatron's schedule.
    """

    package: ClassVar[str]
    fits: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    module: ClassVar[str]

    def __init__(self) -> None:
        self.options = read_options()
        check_names(self.names, fits=self.fits)
        self.adapter = ScheduleAdapter(import_module(self.module), self._ids_of, replays=self._is_planned)

    @abstractmethod
    def replays(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the framework replays routing in a call of Megatron's schedule with these arguments."""

    @abstractmethod
    def routes(self, micro_batch: Any, chunks: Sequence[nn.Module]) -> SlicedRoutes | None:
        """The routes of a micro-batch of a pass that replays them; None if it has none."""

    def balance(self, model: Any, config: Any) -> None:
        """Balance the model, and print the first line. Call it when it is built and loaded, on all ranks.

        Args:
            model: the model or its chunks.
            config: its TransformerConfig.

        Raises:
            InputError: if the model is refused; see `megatron.balance`.
        """
        print_on_first_rank(first_line(self.package, self.options, config))
        self.adapter.install()
        self.adapter.balance(model, self.options)

    def figures(self) -> dict[str, float]:
        """Figures since the last call, see `step_figures`."""
        figures = [step_figures(session) for session in self.adapter.sessions]
        return {name: value for each in figures for name, value in each.items()}

    def suspend(self) -> None:
        """Give slots and process groups back until the next planned pass. Collective."""
        for session in self.adapter.sessions:
            if session.session is not None:
                session.session.suspend()

    def uninstall(self) -> None:
        """Give names and model back as they were. Call it between steps, on all ranks."""
        self.adapter.uninstall()

    def _is_planned(self, arguments: Mapping[str, Any]) -> bool:
        return self.options.mode == "live" or self.replays(arguments)

    def _ids_of(self, micro_batch: Any, chunks: Sequence[nn.Module]) -> MicroBatchRoutes | None:
        session = self.adapter.session_of(chunks)
        if session is None:
            return None
        if self.options.mode == "live":
            return MicroBatchRoutes(_NO_IDS)
        routes = self.routes(micro_batch, chunks)
        if routes is None:
            return None
        layers, is_read = routes
        if not layers:
            return MicroBatchRoutes(_NO_IDS)
        ids_NLK = torch.stack(list(layers), dim=1).cpu()
        if is_read is None or session.session is None or session.session.auxiliary_loss():
            return MicroBatchRoutes(ids_NLK.numpy())
        is_read_N = is_read.cpu().bool()
        ids_NLK[~is_read_N] = -1
        return MicroBatchRoutes(ids_NLK.numpy(), (~is_read_N).numpy())


def read_options() -> PluginOptions:
    """The options of `TRIMTAB_BALANCE`. Raises InputError."""
    return PluginOptions.from_text(os.environ.get(VARIABLE, ""), source=VARIABLE)


def megatron_refusals(*parts: Mapping[str, Any] | None) -> list[str]:
    """Why options of Megatron in parts of a framework's config are refused, one line each."""
    known = names()
    given = {name: value for part in parts for name, value in (part or {}).items() if name in known}
    return list(refusals(given).values())
