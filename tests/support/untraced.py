"""Imported, it lets DALI's operators forget where they were defined: to note 60 frames of pytest takes longer."""

from nvidia.dali._utils.dali_trace import set_tracing

set_tracing(enabled=False)
