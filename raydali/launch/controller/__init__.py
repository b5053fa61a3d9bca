"""What runs in Ray Train's controller actor."""
