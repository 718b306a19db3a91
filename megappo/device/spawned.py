"""Processes that a command starts for itself: they end with it, however it ends."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """In a process of `multiprocessing`: end at once when the process that started it is gone, SIGKILL included.

    `daemon=True` ends a child only where its parent has the time to.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True, name="end-with-parent").start()
