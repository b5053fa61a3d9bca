"""Whether hosts are fit to train on: `raydali doctor`, and what every worker looks at when it starts."""
