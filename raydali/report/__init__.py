"""Shows a run: console, report.html, TensorBoard, trackers, contact sheets."""
