"""Where the time goes: clocks, epoch records, merging ranks, the ceiling, the verdict. Pure: no Ray, no DALI."""
