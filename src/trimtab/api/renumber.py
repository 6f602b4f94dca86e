"""`trimtab.renumber_checkpoint`: a checkpoint with experts in an order that balances ranks, and its gain."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from trimtab.api.advise import MOST_LAYERS, MOST_STEPS
from trimtab.api.run import Run
from trimtab.api.steps import read_steps, spread_layers
from trimtab.array_type import Array
from trimtab.cluster import load_model
from trimtab.errors import InputError
from trimtab.kinds import text
from trimtab.planner.placement.expert_order import order_experts
from trimtab.renumber.checkpoint import CheckpointFiles, write_renumbered
from trimtab.simulator.strategies import NOTHING, REPLICAS
from trimtab.trace import RoutingTrace
from trimtab.trace.numbering import FILE, Numbering
from trimtab.trace.store import Source, open_trace

# Part of a step's seconds.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class RenumberResult:
    """A renumbered checkpoint.

    Attributes:
        output: its folder.
        numbering: first ids of its experts.
        changed: experts, over all layers, that have another rank now.
        layers: that have another order.
        seconds: of a step, by strategy: as numbered before, and renumbered.
        steps: that the order is made from, and that are simulated.
        assumed: sentences on what nobody stated, each with the option that changes it.
    """

    output: Path
    numbering: Numbering
    changed: int
    layers: int
    seconds: dict[str, tuple[float, float]]
    steps: tuple[int, int]
    assumed: tuple[str, ...] = ()

    def figures(self) -> dict[str, Any]:
        """What `trimtab renumber --json` writes.

        output: the new folder.
        layers_renumbered, experts_on_other_ranks: in the whole checkpoint.
        steps_of_order, steps_simulated: recorded steps.
        strategies: by name, seconds of a step before and after, and the part that is gained.
        first_ids: by decoder layer, the first id of the expert with each new id.
        """
        return {
            "schema": "trimtab-renumber-1",
            "output": str(self.output),
            "layers_renumbered": self.layers,
            "experts_on_other_ranks": self.changed,
            "steps_of_order": self.steps[0],
            "steps_simulated": self.steps[1],
            "assumed": list(self.assumed),
            "strategies": {
                name: {"before_s": before, "after_s": after, "gain": 1 - after / before}
                for name, (before, after) in self.seconds.items()
            },
            "first_ids": self.numbering.to_json(),
        }


def renumber_checkpoint(
    model: str | os.PathLike[str],
    trace: RoutingTrace | Source,
    output: str | os.PathLike[str],
    run: Run = Run(),  # noqa: B008
    *,
    pattern: Annotated[Sequence[str], text] = (),
) -> RenumberResult:
    """Write a checkpoint with the experts of each layer in another order, so that the ranks of a run have even loads:
    the experts, the rows of the router and all else that is indexed by expert. The model computes the same function,
    under the same names, in every framework. The order is made from the first steps of the trace, and its gain
    simulated in the last ones; below 1% nothing is written.

    The last steps are at most 2, and at most 8 layers stand for the model; of a single step, the order is made from one
    half of its prompts and judged in the other.

    Args:
        model: a folder with config.json and safetensors files.
        trace: routing of the model; recorded in another numbering of it, it is mapped.
        output: folder to write, which must not exist.
        run: the training run; the model is the checkpoint, and steps are those of the trace.
        pattern: tensors that are indexed by expert, searched behind the layer's number; its group is the number of an
            expert whose tensors are single; may be repeated; by default names of the known model types.

    Raises:
        InputError: as `simulate`; if the gain is below 1%; or as `write_renumbered`.
    """
    folder, output = _folders(model, output)
    spec = load_model(folder)
    files = CheckpointFiles(folder, spec.zero_experts, pattern)
    now = Numbering.of_checkpoint(folder)
    reader = open_trace(trace)
    run = replace(run, model=spec, overrides=(), step=None, steps=None).on_ranks(reader)
    run.model_of(reader)
    indices = reader.empty.layer_indices.tolist()
    # What can't be renumbered is refused before anything is simulated.
    files.changes(dict.fromkeys(indices, np.arange(spec.num_experts)))
    run.settings(spec)
    nodes = run.nodes
    if now.first and reader.empty.numbering is None:
        raise InputError(
            f"{reader.name} does not say which ids recorded it, and {folder} is renumbered; "
            "trimtab trace renumber --recorded-by says it"
        )
    recorded = read_steps(open_trace(_in_steps(reader.read().in_numbering(now))), run, most=MOST_STEPS)
    recorded = replace(recorded, name=reader.name)
    past = recorded.recorded[: len(recorded.recorded) - recorded.measured]
    past_PLE = np.stack([step.counts.counts_SLE.sum(axis=0, dtype=np.int64) for step in past])
    order_LE = order_experts(past_PLE, nodes.ranks, nodes.ranks_per_node, spec.expert_groups)
    layers = spread_layers(recorded, nodes.ranks, MOST_LAYERS)
    case = recorded.with_layers(layers).case(run, spec)
    renumbered = case.permuted(order_LE[layers])
    seconds = {
        each.name: (each.simulate(case).simulated.step_time_s, each.simulate(renumbered).simulated.step_time_s)
        for each in (NOTHING, REPLICAS)
    }
    gains = {name: 1 - after / before for name, (before, after) in seconds.items()}
    if max(gains.values()) < LEAST_GAIN:
        listed = ", ".join(f"{gain:+.1%} with {name}" for name, gain in gains.items())
        raise InputError(f"{folder}: renumbering for {reader.name} gains {listed}; below {LEAST_GAIN:.0%}, not written")
    numbering = now.then(order_LE, reader.empty.layer_indices)
    write_renumbered(files, output, dict(zip(indices, order_LE, strict=True)), numbering)
    size = spec.num_experts // nodes.ranks
    first = np.arange(spec.num_experts)
    return RenumberResult(
        output=output,
        numbering=numbering,
        changed=int(np.count_nonzero(order_LE // size != first // size)),
        layers=int(np.count_nonzero((order_LE != first).any(axis=1))),
        seconds=seconds,
        steps=(len(past), recorded.measured),
        assumed=case.assumed,
    )


def undo_renumbering(
    model: str | os.PathLike[str], output: str | os.PathLike[str], *, pattern: Sequence[str] = ()
) -> None:
    """Write a renumbered checkpoint with its first ids, as `trimtab renumber --undo` does.

    Raises:
        InputError: if it is not renumbered, or as `write_renumbered`.
    """
    folder, output = _folders(model, output)
    spec = load_model(folder)
    now = Numbering.of_checkpoint(folder)
    if not now.first:
        raise InputError(f"{folder}: has no {FILE}, so its experts have their first ids")
    layers = sorted(now.first)
    order_LE = Numbering().order_from(now, np.array(layers), spec.num_experts)
    files = CheckpointFiles(folder, spec.zero_experts, pattern)
    write_renumbered(files, output, dict(zip(layers, order_LE, strict=True)), Numbering())


def _folders(model: str | os.PathLike[str], output: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The checkpoint's folder, and one that can be written."""
    folder, new = Path(model), Path(output)
    if not (folder.is_dir() and (folder / "config.json").is_file()):
        raise InputError(f"{folder}: expected the folder of a checkpoint, with config.json and safetensors files")
    if new.exists() or folder.resolve() in new.resolve().parents:
        raise InputError(f"{new}: exists, or is in {folder}; name a new folder")
    return folder, new


def _in_steps(trace: RoutingTrace) -> RoutingTrace:
    """The trace; if it has a single step, each half of its prompts is one."""
    if len(np.unique(trace.steps)) != 1:
        return trace
    hashes = trace.prompt_hashes.copy()
    # A sequence whose prompt is unknown is alone.
    unknown = hashes == 0
    prompts = np.where(unknown, np.arange(len(hashes), dtype=np.uint64), hashes)
    half: Array = np.unique(prompts, return_inverse=True)[1] % 2
    if not half.any():
        half = np.arange(len(hashes)) % 2
    if not half.any():
        raise InputError(
            "the trace has a single sequence; an order is made from one part of them, and judged in another"
        )
    return replace(trace, steps=half.astype(np.int32))
