"""What a run shows and records: mergeable metrics, trackers, console, timers, logs, the run directory.

Owns: metric arithmetic, every place where metrics go, and what a person sees while a run goes on. Must not import
torch, ray, megatron or anything of megappo but `config` and `errors`. To add a tracker: a class with the methods of
`Tracker` (see `mlflow_tracker.py`), switched on by a key of `TrackingConfig` and made in `megappo.cli.recorder`.
To add a metric: return it from where it is computed and add its row to `metric_catalogue.py`.
"""
