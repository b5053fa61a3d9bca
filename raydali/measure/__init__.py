"""Measurement: clocks, epoch records, the ceiling, and the verdict on an epoch's time. No Ray, no DALI."""
