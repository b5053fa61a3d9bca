"""`raydali doctor`: checks of hosts and cluster nodes before training."""
