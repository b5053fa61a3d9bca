"""Models, their trained weights, the step, and evaluation."""
