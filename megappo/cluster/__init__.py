"""Ray: placement, worker processes, typed groups, health.

The only package that imports ray. Nothing here decides what a step does.
"""
