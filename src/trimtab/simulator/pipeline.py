"""Pipeline stages: seconds of a 1F1B pipeline from the seconds of passes through all layers.

The timeline runs the stages of a micro-step one after another. Of each pass it gives the seconds of every layer, those
of the busiest rank where ranks wait for each other. A stage takes the sum of its layers; what the pipeline takes longer
than the mean of its stages is the bubble.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import Layout, ModelSpec
from trimtab.kernels import kernel

BUBBLE = "bubble"
"""Part of a step, with more than one stage."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The stages of a simulated step.

    Attributes:
        weights_PX: `[P, L + 1]` the part of each layer's seconds, and of those outside MoE layers, that each stage has.
        send_M: `[M]` seconds to send a micro-step's activations, or their gradients, to the next stage.
    """

    weights_PX: Array
    send_M: Array

    @classmethod
    def of(cls, layout: Layout, model: ModelSpec, layers: int, head_part: float, send_M: Array) -> Pipeline:
        """Stages of a model, of which some layers are simulated.

        With all layers of the model each stage has its own. Else every stage has their mean, so that none is slow but
        by its number of layers.

        Args:
            head_part: output head's part of the seconds outside MoE layers, which the last stage has.
        """
        moe_P, dense_P = layout.stages(model)
        shares_P = moe_P / model.moe_layers
        weights_PX = np.repeat(shares_P[:, None], layers + 1, axis=1)
        if layers == model.moe_layers:
            of_layer = np.repeat(np.arange(layout.pp), moe_P)
            weights_PX[:, :-1] = of_layer == np.arange(layout.pp)[:, None]
        weights_PX[:, -1] = (1 - head_part) * dense_P / dense_P.sum() if dense_P.any() else 0.0
        weights_PX[-1, -1] += head_part if dense_P.any() else 1.0
        return cls(weights_PX, send_M)

    @property
    def stages(self) -> int:
        return len(self.weights_PX)


@dataclass(eq=False)
class PassTimes:
    """Seconds of passes, in the order in which they ran.

    Attributes:
        phases: for each time that all micro-steps drain from the pipeline, its passes: the group's number, the
            micro-step, whether it is backward, and `[L + 1]` seconds by layer, and outside MoE layers.
    """

    phases: list[list[tuple[int, int, bool, Array]]] = field(default_factory=list)

    def bubble(self, pipeline: Pipeline) -> float:
        """Seconds that the pipeline takes longer than all passes divided by the number of stages, at least 0."""
        return sum(self._bubble_of_phase(passes, pipeline) for passes in self.phases)

    def _bubble_of_phase(self, passes: list[tuple[int, int, bool, Array]], pipeline: Pipeline) -> float:
        longest = busiest = 0.0
        for group in {each[0] for each in passes}:
            mine = [each for each in passes if each[0] == group]
            order = list(dict.fromkeys(m for _, m, _, _ in mine))
            seconds_2MP = np.zeros((2, len(order), pipeline.stages))
            for _, m, is_backward, seconds_X in mine:
                seconds_2MP[int(is_backward), order.index(m)] += pipeline.weights_PX @ seconds_X
            has_backward = any(is_backward for _, _, is_backward, _ in mine)
            send_M = pipeline.send_M[order]
            longest = max(longest, float(one_forward_one_backward(seconds_2MP, send_M, has_backward)))
            busiest = max(busiest, float(sum(seconds_X.sum() for _, _, _, seconds_X in mine)))
        return longest - busiest / pipeline.stages


@kernel
def one_forward_one_backward(seconds_2MP, send_M, has_backward):  # type: ignore[no-untyped-def]
    """Seconds until all stages are done.

    Stage p of P first runs min(M, P - 1 - p) forwards, then a forward and a backward in turn, then the other backwards.
    A forward needs that of the stage before, a backward that of the stage behind, and both what is sent.

    Args:
        seconds_2MP: `[2, M, P]` forward and backward of each micro-step on each stage.
        send_M: `[M]` between two stages.
        has_backward: False: all forwards, one after another.
    """
    _, num, stages = seconds_2MP.shape
    ends_2MP = np.zeros(seconds_2MP.shape)
    free_P = np.zeros(stages)
    done_2P = np.zeros((2, stages), np.int64)
    total = num * (2 if has_backward else 1)
    waiting = total * stages
    while waiting > 0:
        for p in range(stages):
            while done_2P[0, p] + done_2P[1, p] < total:
                f, b = done_2P[0, p], done_2P[1, p]
                # A stage is so many forwards ahead of its backwards at most.
                is_forward = f < num and (not has_backward or f - b < stages - p)
                kind, m = (0, f) if is_forward else (1, b)
                source = p - 1 if is_forward else p + 1
                ready = 0.0
                if 0 <= source < stages:
                    if done_2P[kind, source] <= m:
                        break
                    ready = ends_2MP[kind, m, source] + send_M[m]
                free_P[p] = max(free_P[p], ready) + seconds_2MP[kind, m, p]
                ends_2MP[kind, m, p] = free_P[p]
                done_2P[kind, p] += 1
                waiting -= 1
    return free_P.max()
