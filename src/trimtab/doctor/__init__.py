"""Checks of `trimtab doctor`. Without torch only planning is checked."""

from trimtab.doctor.examination import examine
from trimtab.doctor.finding import Finding

__all__ = ["Finding", "examine"]
