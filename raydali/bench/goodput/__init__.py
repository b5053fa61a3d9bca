"""`raydali bench goodput`: the time to a step while ranks are killed, for several ways to survive it."""
