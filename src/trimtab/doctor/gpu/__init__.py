"""Stages of `trimtab doctor --gpu`: what only a GPU can show. They also run on a CPU, where only the device differs."""

from trimtab.doctor.gpu.gpu_examination import examine_gpus
from trimtab.doctor.gpu.verdict import verdict

__all__ = ["examine_gpus", "verdict"]
