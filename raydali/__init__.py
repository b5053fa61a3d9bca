"""Ray Train jobs for vision models, fed by NVIDIA DALI: each sample exactly once, at the speed of the step."""
