"""Counters for Prometheus, through Ray's own metrics."""

from ray.util.metrics import Counter


def counter(name: str, text: str, tags: dict[str, str]) -> Counter:
    """Return a counter that Prometheus sees at 0 from the start, so that it notices the first increment."""
    made: Counter = Counter(name, text, tuple(tags)).set_default_tags(tags)
    made._record(0.0)  # `inc` refuses 0
    return made
