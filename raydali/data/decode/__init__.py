"""Decoding of pictures: which decoder takes a file, and Pillow, which takes what DALI cannot."""
