"""What a run shows and records: mergeable metrics, trackers, console, timers, logs.

Owns: metric arithmetic and every place where metrics go. Must not import torch, ray or megatron.
To add a tracker: implement `Tracker` and list it in `tracker.py`.
"""
