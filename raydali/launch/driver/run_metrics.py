"""Metrics of a run that only the driver knows, for Prometheus; launch/worker/rank_metrics.py has the others."""

from ray.util.metrics import Counter

from raydali.run.events import Event, Quarantined, Started

RESTARTS = "raydali_restarts"
QUARANTINED = "raydali_quarantined"


class RunMetrics:
    """Counters of the run of that name."""

    def __init__(self, run: str) -> None:
        text = "Restarts of the workers of this run, after failures and resizes."
        self._restarts = Counter(RESTARTS, text, ("run",)).set_default_tags({"run": run})
        text = "Broken samples of this run."
        self._quarantined = Counter(QUARANTINED, text, ("run",)).set_default_tags({"run": run})
        for counter in (self._restarts, self._quarantined):
            counter._record(0.0)  # so that Prometheus sees the first increment; `inc` refuses 0
        self._started = False

    def count(self, event: Event) -> None:
        """Count restarts, which are starts but the first, and broken samples."""
        if isinstance(event, Quarantined):
            self._quarantined.inc()
        elif isinstance(event, Started):
            if self._started:
                self._restarts.inc()
            self._started = True
