"""Checks of `trimtab doctor`. Without torch only planning is checked."""

from trimtab.doctor.examination import examine
from trimtab.doctor.finding import Finding
from trimtab.doctor.megatron_check import check_megatron

__all__ = ["Finding", "check_megatron", "examine"]
