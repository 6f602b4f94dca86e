"""Check of a model: family, experts on each rank, memory of replicas and mirror."""

from __future__ import annotations

from trimtab.cluster import ModelSpec
from trimtab.cluster.specs import RING_LAYERS
from trimtab.doctor.finding import Finding
from trimtab.errors import InputError
from trimtab.planner import Placement
from trimtab.report.number_text import bytes_text


def check_model(model: ModelSpec, num_layers: int | None, *, ranks: int, slots: int, trains: bool) -> list[Finding]:
    """Check that a model can be trained on this number of ranks, and report the memory of replicas; see `examine`.

    Args:
        trains: torch is installed; without it the model's family and shared memory are not checked.
    """
    findings = []
    if trains:
        from trimtab.integrations.transformers import SUPPORTED_MODEL_TYPES

        if model.name in SUPPORTED_MODEL_TYPES:
            findings.append(Finding("model family", "ok", f"{model.name} is supported"))
        else:
            text = (
                f"{model.name!r} is not among {', '.join(SUPPORTED_MODEL_TYPES)}; add its layers to a Session yourself"
            )
            findings.append(Finding("model family", "problem", text))
    try:
        Placement.contiguous(1, model.num_experts, ranks)
    except InputError as error:
        return [*findings, Finding("experts", "problem", str(error))]
    here = f"{model.num_experts // ranks} of {model.num_experts} experts a rank"
    size = f"{bytes_text(model.expert_bytes)} each at {model.weight_bytes} bytes a weight"
    findings.append(Finding("experts", "ok", f"{here}, {size}"))
    pool = RING_LAYERS * slots * model.expert_bytes
    text = f"{bytes_text(pool)} a rank for {slots} slots in {RING_LAYERS} layers"
    if num_layers is None:
        return [*findings, Finding("replica memory", "ok", text)]
    mirror = num_layers * model.num_experts * model.expert_bytes
    text += f"; mirror at most {bytes_text(mirror)} per node, if every expert uses the host path"
    if trains:
        from trimtab.shared_files import free_shared_memory

        if (free := free_shared_memory()) < mirror:
            text += f", and shared memory has {bytes_text(free)} free: set mirror_bytes below that, or enlarge it"
            return [*findings, Finding("replica memory", "warning", text)]
    return [*findings, Finding("replica memory", "ok", text)]
