"""Code that runs in Ray Train's controller actor."""
