"""Weights that training begins with: found and read (reading.py), and matched with a model (matching.py)."""
