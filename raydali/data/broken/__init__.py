"""Broken samples: how they are found, and what replaces them."""
