"""Measures the rates of this machine, as a `ClusterSpec`: what `trimtab calibrate` does."""

from trimtab.calibration.calibrate import calibrate
from trimtab.calibration.calibration_result import CalibrationResult
from trimtab.calibration.calibration_settings import CalibrationSettings, settings_for

__all__ = ["CalibrationResult", "CalibrationSettings", "calibrate", "settings_for"]
