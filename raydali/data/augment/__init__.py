"""Augmentation of 8-bit images after they are resized: drawn on the host, applied on the device."""
