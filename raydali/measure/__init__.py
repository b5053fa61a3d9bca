"""Where the time goes: clocks, epoch records, merging ranks. Pure: no Ray, no DALI."""
