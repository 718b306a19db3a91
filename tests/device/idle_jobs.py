"""Jobs that need neither torch nor Megatron, whose import takes seconds in every new process."""

import os
import time


def sleep_forever() -> None:
    time.sleep(1000)


def process_id() -> int:
    return os.getpid()
