"""Measurements: one program per question, side by side with a peer, on a common harness (README.md)."""
