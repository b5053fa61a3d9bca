"""A trained model as one file for other programs: its inputs are 8-bit images of any size."""
