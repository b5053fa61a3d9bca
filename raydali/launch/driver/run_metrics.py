"""What Prometheus sees of a run that only the driver knows; see launch/worker/rank_metrics.py for the rest."""

from ray.util.metrics import Counter

from raydali.launch.worker.rank_metrics import begin

RESTARTS = "raydali_restarts"
QUARANTINED = "raydali_quarantined"


class RunMetrics:
    """What only the driver knows of the run of that name."""

    def __init__(self, run: str) -> None:
        text = "How often the workers of this run started again, after a failure or for another number of them."
        self._restarts = Counter(RESTARTS, text, ("run",)).set_default_tags({"run": run})
        text = "Samples of this run that were found broken."
        self._quarantined = Counter(QUARANTINED, text, ("run",)).set_default_tags({"run": run})
        self._started = False
        begin(self._restarts)
        begin(self._quarantined)

    def started(self) -> None:
        """The workers have taken their first step, or the first one since they were started again."""
        if self._started:
            self._restarts.inc()
        self._started = True

    def quarantined(self) -> None:
        """One more sample was found broken."""
        self._quarantined.inc()
