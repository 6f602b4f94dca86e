"""Observe a training run: its recorded routing as a trace, and what imbalance costs, without changing the run.

Start with `observer.py` (`Observer`), then `frameworks.py` (what each framework hands over).
"""

from trimtab.observe.observer import Observer
from trimtab.observe.sinks import JsonLines, MLflow, PrometheusText, Sink, TensorBoard, WandB

__all__ = ["JsonLines", "MLflow", "Observer", "PrometheusText", "Sink", "TensorBoard", "WandB"]
