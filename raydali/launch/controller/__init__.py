"""Code that runs in Ray Train's controller, which shares the process of the channel, see launch/trainer.py."""
