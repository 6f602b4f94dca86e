"""`run_megatron`: three steps of a user's Megatron configuration, made small, with and without balance, compared."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.doctor.finding import Finding
from trimtab.doctor.megatron_check import RESHARDABLE, SIZES, read_options
from trimtab.errors import InputError, RankFailedError
from trimtab.integrations.megatron.option_tables import immovable, refusals
from trimtab.launch.launcher import launch

if TYPE_CHECKING:
    import torch

    from trimtab.doctor.small_megatron import SmallLayout, SmallMegatron
    from trimtab.integrations.megatron import MegatronSession

STEPS, MICRO_BATCHES = 3, 4
# Relative differences that rounding makes in three steps: sums over a token's experts have another order.
ALLOWED, ALLOWED_IN_BF16 = 1e-4, 3e-2
NAME, RESHARDED = "megatron run", "fully_reshardable"


def run_megatron(path: Path) -> list[Finding]:
    """Run the options in a file on 2 or 4 local CPU ranks; see `read_options`.

    Raises:
        InputError: if the file can't be read, or has no options.
    """
    values = read_options(path)[0]
    refused = refusals(values)
    if refused:
        return [Finding(NAME, "warning", f"not run, since {', '.join(refused)} are refused")]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "findings.json"
        sizes = {name: min(2, int(values.get(field) or 1)) for name, field in SIZES.items() if name in ("TP", "PP")}
        try:
            launch(_run_on_rank, (values, sizes, file), ranks=2 * sizes["PP"])
        except (InputError, RankFailedError) as error:
            return [Finding(NAME, "problem", str(error).splitlines()[0])]
        return [Finding(**finding) for finding in json.loads(file.read_text())]


def _run_on_rank(values: dict[str, Any], sizes: dict[str, int], file: Path) -> None:
    import torch.distributed as dist

    findings = compare(values, sizes)
    if dist.get_rank() == 0:
        file.write_text(json.dumps([asdict(finding) for finding in findings]))


def compare(values: Mapping[str, Any], sizes: Mapping[str, int]) -> list[Finding]:
    """Run options on these ranks, in process groups of their own; all ranks get the same findings. Collective.

    Args:
        values: by their names in Megatron's configurations.
        sizes: of `TP` and `PP`, 1 or 2. There are 2 ranks for each pipeline stage.
    """
    from trimtab.integrations.megatron.on_cpu import use_cpu

    use_cpu()
    import torch
    from megatron.core import parallel_state

    from trimtab.doctor.small_megatron import SmallLayout

    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    chunks = values.get("virtual_pipeline_model_parallel_size") or values.get("num_layers_per_virtual_pipeline_stage")
    layout = SmallLayout(sizes["TP"], sizes["PP"], 2 if chunks and sizes["PP"] > 1 else 1)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        expert_model_parallel_size=2, expert_tensor_parallel_size=1,
    )  # fmt: skip
    return _Comparison(values, layout).findings()


class _Comparison:
    """Two equal models, one balanced; all ranks get the same findings. Collective."""

    def __init__(self, values: Mapping[str, Any], layout: SmallLayout) -> None:
        import numpy as np
        import torch.distributed as dist

        from trimtab.doctor.small_megatron import EXPERTS, SmallMegatron
        from trimtab.integrations.megatron import balance

        self._values, self._layout = values, layout
        self._moves = not immovable(values)
        self._plain, self._balanced = SmallMegatron(values, layout), SmallMegatron(values, layout)
        # With room for all experts every step can be spread evenly, and has replicas.
        self._session: MegatronSession = balance(self._balanced.chunks, slots_per_rank=EXPERTS // 2, exact=True)
        if self._moves:
            self._session.register_optimizer(self._balanced.optimizer)
        self._allowed = ALLOWED_IN_BF16 if self._plain.config.bf16 else ALLOWED
        self._homes_rng, self._tokens_rng = np.random.default_rng(0), np.random.default_rng((1, dist.get_rank() % 2))
        if layout.tensor > 1:
            self._tokens_rng = np.random.default_rng(1)

    def findings(self) -> list[Finding]:
        text = f"EP 2, TP {self._layout.tensor}, PP {self._layout.pipeline}, {self._layout.ranks} CPU ranks"
        if self._plain.replaced:
            text += f"; without {', '.join(self._plain.replaced)}, which need a GPU"
        found = [Finding(NAME, "ok", text), self._compare_steps()]
        if self._moves:
            found += [self._compare_exports(), self._compare_checkpoints()]
        return [*found, self._compare_after_removal()]

    def _compare_steps(self) -> Finding:
        losses, replicas, moved = 0.0, 0, 0
        for step in range(STEPS):
            if self._moves and step:
                moved += self._move()
            losses = max(losses, self._step(self._session.planned))
            replicas += 0 if self._session.report is None else self._session.report.replicas
        losses, away = self._worst(losses), self._worst(float(self._session.have_moved))
        if self._moves:
            self._session.return_home()
        parameters = self._worst(self._difference())
        replicas, moved = int(self._worst(replicas)), int(self._worst(moved))
        text = (
            f"{STEPS} steps with {replicas} replicas and {moved} moved experts: losses differ by {losses:.0e}, "
            f"parameters and optimizer state by {parameters:.0e} (allowed: {self._allowed:.0e})"
        )
        is_equal = max(losses, parameters) < self._allowed and replicas > 0 and away >= self._moves
        return Finding(f"{NAME}: steps", "ok" if is_equal else "problem", text)

    def _step(self, planned: Callable[..., Any] | None) -> float:
        """Trains both models for a step; returns the relative difference of their losses."""
        import torch

        from trimtab.doctor.small_megatron import LENGTH, VOCABULARY

        tokens_MBS = torch.from_numpy(self._tokens_rng.integers(0, VOCABULARY, (MICRO_BATCHES, LENGTH)))
        routing = self._plain.record(tokens_MBS)
        functions = [
            self._plain.function,
            self._plain.function if planned is None else planned(self._plain.function, routing),
        ]
        losses = []
        for model, function in zip((self._plain, self._balanced), functions, strict=True):
            model.zero()
            losses.append(model.run(function, tokens_MBS))
            model.optimizer.step()
        return abs(losses[1] - losses[0]) / max(abs(losses[0]), 1e-30)

    def _move(self) -> int:
        """Moves all experts to other ranks and rows at random; returns how many have changed their rank."""
        import numpy as np

        from trimtab.planner import Placement

        session = self._session.session
        if session is None:
            return 0
        before = session.placement.home
        homes = np.stack([self._homes_rng.permutation(row) for row in before])
        homes[0] = before[0][::-1]
        self._session.move(Placement(homes.astype(before.dtype)))
        return int((homes != before).sum())

    def _difference(self) -> float:
        """The largest relative difference of parameters and optimizer state on this rank."""
        return max(
            (_error(*pair) for pair in zip(_state(self._plain), _state(self._balanced), strict=True)), default=0.0
        )

    def _compare_exports(self) -> Finding:
        """Names of experts that are away: logical within `logical_names`, refused outside."""
        self._move()
        session, text = self._session, "names of moved experts are logical within logical_names()"
        found = dict(session.logical_names(_exported(self._balanced)))
        session_error = max((_error(value, found[name]) for name, value in _exported(self._plain)), default=0.0)
        error, is_refused = self._worst(session_error), True
        if session.have_moved:
            try:
                dict(self._balanced.chunks[0].named_parameters())
                is_refused = False
            except InputError:
                text += ", and refused outside of it"
        is_right = error < self._allowed and self._worst(float(not is_refused)) == 0
        return Finding(f"{NAME}: exports", "ok" if is_right else "problem", f"{text}; weights differ by {error:.0e}")

    def _compare_checkpoints(self) -> Finding:
        """Shards of model and optimizer, of all ranks, in the format that the configuration chooses."""
        import torch.distributed as dist

        kind = RESHARDED if self._values.get(RESHARDABLE) else "dp_reshardable"
        gathered: list[dict[Any, torch.Tensor]] = []
        for model in (self._plain, self._balanced):
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, dict(_shards(model, kind)))
            gathered.append({key: shard for of_rank in of_ranks for key, shard in of_rank.items()})
        plain, balanced = gathered
        same_keys = plain.keys() == balanced.keys()
        error = max(_error(value, balanced[key]) for key, value in plain.items()) if same_keys else float("inf")
        # Shards of the optimizer by position have padding of any value; their content is compared in memory.
        error = error if kind == RESHARDED else max(error, self._worst(self._difference()))
        away = bool(self._worst(float(self._session.have_moved)))
        text = (
            f"{len(plain)} shards in {kind} differ by {error:.0e}; experts {'were away' if away else 'returned home'}"
        )
        return Finding(f"{NAME}: checkpoint", "ok" if error < self._allowed else "problem", text)

    def _compare_after_removal(self) -> Finding:
        self._session.remove()
        modules = {type(layer.token_dispatcher).__module__.partition(".")[0] for layer in self._balanced.moe_layers()}
        error = self._worst(max(self._step(None), self._difference()))
        text = f"a step after remove() differs by {error:.0e}"
        return Finding(
            f"{NAME}: removed", "ok" if modules <= {"megatron"} and error < self._allowed else "problem", text
        )

    def _worst(self, value: float) -> float:
        """The largest value of all ranks; infinity for one that is not a number."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(value if value == value else float("inf"), dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)


def _error(expected: Any, actual: Any) -> float:
    difference = float((actual.double() - expected.double()).norm())
    return difference / max(float(expected.double().norm()), 1e-6) if difference == difference else float("inf")


def _state(model: SmallMegatron) -> Iterator[torch.Tensor]:
    """Parameters, buffers of routers, and the state of the optimizers, on this rank."""
    from trimtab.integrations.megatron.optimizer_state import optimizers_in

    for chunk in model.chunks:
        if chunk.ddp_config.overlap_param_gather:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group.start_param_sync(force_sync=True)
        yield from (value.detach() for value in (*chunk.parameters(), *chunk.module.buffers()) if value is not None)
    for one in optimizers_in(model.optimizer):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter.detach()
                states = one.optimizer.state[parameter].items()
                yield from (value for _, value in sorted(states) if hasattr(value, "ndim") and value.ndim)


def _exported(model: SmallMegatron) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of this stage's experts on all ranks, numbered by position as exporters do it."""
    import torch
    import torch.distributed as dist

    for layer in model.moe_layers():
        rank, local = layer.ep_group.size(), layer.num_local_experts
        for row, expert in enumerate(layer.experts.local_experts):
            for name, value in expert.named_parameters():
                parts = [torch.empty_like(value) for _ in range(rank)]
                dist.all_gather(parts, value.detach(), group=layer.ep_group)
                for number, part in enumerate(parts):
                    prefix = f"decoder.layers.{layer.layer_number - 1}.mlp.experts.local_experts"
                    yield f"{prefix}.{number * local + row}.{name}", part


def _shards(model: SmallMegatron, kind: str) -> Iterator[tuple[Any, torch.Tensor]]:
    """Key and place of every shard of a checkpoint on this rank, and its values."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    metadata = {
        "distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }  # fmt: skip
    state: dict[str, Any] = {
        f"model{number}" if len(model.chunks) > 1 else "model": chunk.module.sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(model.chunks)
    }
    state["optimizer"] = model.optimizer.sharded_state_dict(state, metadata=metadata)
    apply_factories(state)
    for shard in nested_values(state):
        is_compared = isinstance(shard, ShardedTensor) and shard.data is not None
        if is_compared and (kind == RESHARDED or ".distributed." not in shard.key):
            key = shard.key, tuple(shard.global_offset), str(getattr(shard, "flattened_range", None))
            yield key, shard.data.detach().clone()
