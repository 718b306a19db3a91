"""Predictions without devices: memory and layouts. Torch-free."""
