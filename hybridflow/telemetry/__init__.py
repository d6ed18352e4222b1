"""What a run says about itself: terminal, metrics, trackers, samples, timeline and report.

Cheap to import. Jobs use ``hybridflow.telemetry.recorder.Recorder``; workers use ``metrics`` and ``samples``.
"""

from hybridflow.telemetry.metrics import Max, Mean, Metric, Min, Sum, merge
from hybridflow.telemetry.names import check_names, markdown_table, register_metric

__all__ = ["Max", "Mean", "Metric", "Min", "Sum", "check_names", "markdown_table", "merge", "register_metric"]
