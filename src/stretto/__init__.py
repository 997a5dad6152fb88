"""Stretto decides how many GPUs each training run gets, minute by minute."""

__version__ = "0.1.0"
