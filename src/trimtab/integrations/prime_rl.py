"""prime-rl's RL trainer with balanced experts.

`python -m trimtab.integrations.prime_rl rl @ rl.toml` starts what `rl @ rl.toml` does, with this module as its trainer.
In any other start it stands for `prime_rl.trainer.rl.train`, as in `torchrun ... -m trimtab.integrations.prime_rl @
trainer.json`. The trainer's functions are replaced where it looks them up: weights are sharded as for DeepEP, FSDP2
owns them, and the experts run in a `Session`, planned from the `routed_experts` of all micro-batches of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.integrations.framework_options import raise_first, read_options
from trimtab.integrations.fsdp import add_fsdp_layer
from trimtab.integrations.options import PluginOptions
from trimtab.integrations.plugin_report import print_on_first_rank
from trimtab.rank_variables import BALANCE
from trimtab.runtime import ExpertWeight, PlanReport, RowGroups, Session, grouped_linear

TRAINER, LAUNCHER = "prime_rl.trainer.rl.train", "prime_rl.entrypoints.rl"
# Names that are replaced, in the trainer and in the module that builds its model.
NEEDED = ("DataLoader", "forward", "get_load_balance_stats", "main", "scale_gradients_", "setup_model")
WEIGHTS = ("w1", "w2", "w3")
# Fields of the model's config that must have one of these values, and why.
SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "cp": ((1,), "the routes of a sequence's parts are not known to a rank"),
    "full_offload": ((None,), "gradients leave the device before replicas' are joined to them"),
    "fsdp_cpu_offload": ((False,), "weights that FSDP offloads are on the CPU between uses"),
    "lora": ((None,), "adapters of experts are not supported"),
    "quantization": ((None,), "experts compute in the parameters' or FSDP's dtype"),
}


def refused(config: Any) -> list[str]:
    """Why a model's config can't be balanced, one line for each of its fields."""
    found = [
        f"model.{name}={getattr(config, name)!r} is not supported: {reason}"
        for name, (values, reason) in SUPPORTED.items()
        if getattr(config, name, values[0]) not in values
    ]
    return found + ["model.ep is 1, so that every rank has all experts"] * (getattr(config, "ep", None) == 1)


class Balancer:
    """The experts of prime-rl's trainer in a session.

    Args:
        options: of the environment.
        trainer, builder: modules whose functions are replaced by `install`.
    """

    # That of prime-rl's FSDP.
    compute_dtype: torch.dtype | None = torch.bfloat16

    def __init__(self, options: PluginOptions, trainer: Any, builder: Any) -> None:
        self.options, self.trainer, self.builder = options, trainer, builder
        self.session: Session | None = None
        self.report: PlanReport | None = None
        self._layers: list[int] = []
        # A bias by expert follows the routes of all tokens, of padding too.
        self._counts_all = False
        self._next = 0

    def install(self) -> None:
        """Replace the trainer's functions. Raises InputError if one is missing."""
        missing = [name for name in NEEDED if not hasattr(self.trainer, name)]
        if missing or not hasattr(self.builder, "apply_ep"):
            raise InputError(
                f"this version of prime-rl has no {', '.join(missing) or 'apply_ep'} where Trimtab needs it"
            )
        loader, plan = self.trainer.DataLoader, self.plan
        self.builder.apply_ep = _sharding_alone(self.builder.apply_ep)
        for name, function in {"setup_model": self._setup, "forward": self._forward, "scale_gradients_": self._scale,
                               "get_load_balance_stats": self._stats}.items():  # fmt: skip
            setattr(self.trainer, name, wraps(plain := getattr(self.trainer, name))(partial(function, plain)))

        class PlannedLoader(loader):  # type: ignore[misc, valid-type]
            """Plans each step when its batch is there."""

            def get_batch(self) -> Any:
                batches = super().get_batch()
                plan([batch["routed_experts"] for batch in batches])
                return batches

        self.trainer.DataLoader = PlannedLoader

    def _setup(self, plain: Callable[..., Any], config: Any, parallel_dims: Any, *arguments: Any) -> Any:
        raise_first("prime_rl", refused(config))
        model = plain(config, parallel_dims, *arguments)
        layers = self.builder.get_language_model(model).layers
        blocks = {n: mlp for n, layer in enumerate(layers) if hasattr(mlp := getattr(layer, "mlp", None), "experts")}
        self._start(blocks, parallel_dims.get_mesh("ep").mesh.tolist())
        return model

    def _start(self, blocks: Mapping[int, Any], ranks: list[int]) -> None:
        """Run the experts of MoE blocks, by decoder layer, in a new session, whose group has these ranks. Collective.

        Raises:
            InputError: if the model has no blocks that are supported, or its groups are others than a session's.
        """
        if not blocks:
            raise InputError("the model has no MoE layers with experts of prime-rl's own (model.impl=custom)")
        world = torch.distributed.get_world_size()
        self.session = Session(
            num_experts=next(iter(blocks.values())).experts.num_experts, groups=world // len(ranks),
            mode=self.options.mode, slots_per_rank=self.options.slots_per_rank,
        )  # fmt: skip
        if self.session.topology.ranks_by_position != ranks:
            raise InputError(f"experts are spread over ranks {ranks}; Trimtab expects neighbours")
        for layer, block in blocks.items():
            known = all(hasattr(block.experts, name) for name in WEIGHTS) and hasattr(
                block, "_run_deepep_routed_experts"
            )
            if not known or block.score_before_experts:
                raise InputError(f"decoder layer {layer}: {type(block).__name__} is not supported")
            run_in_session(self.session, block, self.compute_dtype)
        self._layers = list(blocks)
        self._counts_all = any(block.expert_bias is not None for block in blocks.values())
        print_on_first_rank(
            f"Trimtab: prime_rl, mode={self.options.mode}, {self.session.num_experts} experts in {len(blocks)} layers, "
            f"on {len(ranks)} ranks; this plugin has never run on a GPU"
        )

    def plan(self, routes: Sequence[torch.Tensor | None]) -> None:
        """Plan a step from the ids `[1, n, decoder layers, K]` of this rank's micro-batches; without, it is live."""
        assert self.session is not None
        self.report, self._next = None, 0
        if self.options.mode in ("live", "off") or not routes or any(ids is None for ids in routes):
            return
        rows = [ids[0][:, self._layers].numpy() for ids in routes if ids is not None]
        unread = list(map(without_route, rows))
        if self._counts_all:
            rows = [np.where(mask[:, None, None], -1, ids) for ids, mask in zip(rows, unread, strict=True)]
        self.report = self.session.plan_micro_steps(rows, unread=None if self._counts_all else unread)

    def _forward(self, plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        assert self.session is not None
        step = self.session.live_micro_step() if self.report is None else self.session.micro_step(self._next)
        self._next += 1
        with step:
            return plain(*arguments, **named)

    def _scale(self, plain: Callable[..., Any], *arguments: Any) -> None:
        assert self.session is not None
        self.session.finish_gradients()
        plain(*arguments)

    def _stats(self, plain: Callable[..., Any], *arguments: Any) -> Any:
        stats = plain(*arguments)
        if self.report is None:
            return stats
        return stats | {
            f"trimtab/{name}": torch.tensor([float(getattr(self.report, name))])
            for name in ("replicas", "max_vio_before", "max_vio_after", "predicted_gain")
        }


def without_route(ids_nLK: Array) -> Array:
    """`[n]` tokens whose ids are all 0, which no router gives: padding and last tokens, whose outputs nothing reads."""
    if ids_nLK.shape[-1] == 1:
        raise InputError("top-1 routing: prime-rl's padding of 0 can't be told from expert 0")
    unread: Array = (ids_nLK == 0).all(axis=(1, 2))
    return unread


def run_in_session(session: Session, block: Any, compute_dtype: torch.dtype | None = None) -> None:
    """Run the experts of an `MoE` block as the session's next layer, by the ids that it replays. Collective."""
    layer = add_fsdp_layer(session, block.experts, WEIGHTS, _products, compute_dtype=compute_dtype)
    replayed = torch.compiler.disable(lambda live: layer.route(live))
    block.experts.forward = torch.compiler.disable(lambda x, ids, scores: layer(x, ids, scores))
    run: Callable[..., Any] = block.experts
    if "_run_local_routed_experts" in getattr(block, "_prime_rl_selective_ac_patched_methods", ()):
        run = partial(checkpoint, block.experts, use_reentrant=False, preserve_rng_state=False)
    choose = block.router.forward

    def route(x: torch.Tensor, bias: Any = None, routed_experts: Any = None) -> Any:
        # With a bias tokens without a route take the router's.
        chooses = routed_experts is None or (bias is not None and layer.replays)
        return choose(x, bias, replayed(choose(x, bias)[1] if chooses else routed_experts))

    def routed_and_shared(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        routed = run(x, ids, scores)
        return routed if block.shared_expert is None else routed + block.shared_expert(x)

    block.router.forward = route
    # The part of the block for DeepEP takes tokens, ids and scores.
    block.ep_comm_backend, block._run_deepep_routed_experts = "deepep", routed_and_shared


def _products(weights: Sequence[ExpertWeight], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    w1, w2, w3 = weights
    return grouped_linear(F.silu(grouped_linear(rows, w1, groups)) * grouped_linear(rows, w3, groups), w2, groups)


def _sharding_alone(apply_ep: Callable[..., Any]) -> Callable[..., Any]:
    """Experts are sharded as for DeepEP, whose dispatch is no part of their module."""

    @wraps(apply_ep)
    def shard(model: Any, config: Any, parallel_dims: Any) -> Any:
        return apply_ep(model, config.model_copy(update={"ep_comm_backend": "deepep"}), parallel_dims)

    return shard


def main(words: Sequence[str]) -> int:
    """Run the launcher (`rl ...`) or, in torchrun, the trainer. Returns the exit status."""
    try:
        options = read_options()
        if options.mode == "shadow":
            raise InputError(f"{BALANCE} has mode=shadow, which this plugin does not have; use plan, live or off")
        if words[:1] == ["rl"]:
            launcher: Any = import_module(LAUNCHER)
            launcher.Popen = partial(_started, launcher.Popen)
            sys.argv = ["rl", *words[1:]]
            launcher.main()
            return 0
        trainer = import_module(TRAINER)
        if options.mode != "off":
            Balancer(options, trainer, import_module("prime_rl.trainer.model")).install()
        sys.argv = [TRAINER, *words]
        trainer.main()
    except InputError as error:
        print(f"trimtab: {error}", file=sys.stderr)
        return 2
    return 0


def _started(plain: Callable[..., Any], command: Any, *arguments: Any, **named: Any) -> Any:
    """A process of the launcher; of the trainer, with this module in place of it."""
    if not isinstance(command, str):
        command = ["trimtab.integrations.prime_rl" if word == TRAINER else word for word in command]
    return plain(command, *arguments, **named)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
