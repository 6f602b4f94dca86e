"""Checks of `trimtab doctor`. Without torch only planning is checked."""

from trimtab.doctor.examination import examine
from trimtab.doctor.finding import Finding
from trimtab.doctor.framework_check import check_miles, check_slime, check_verl
from trimtab.doctor.megatron_check import check_megatron

FILE_CHECKS = {"megatron": check_megatron, "verl": check_verl, "slime": check_slime, "miles": check_miles}
"""Checks of a file by the option of `trimtab doctor` that names it."""

__all__ = ["FILE_CHECKS", "Finding", "check_megatron", "examine"]
