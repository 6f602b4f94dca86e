"""Stages of `trimtab doctor --gpu`: what only a GPU can show. They also run on a CPU, where only the device differs."""

from trimtab.doctor.gpu.gpu_examination import examine_gpus, verdict

__all__ = ["examine_gpus", "verdict"]
