"""Stands for a command that trains: does what its first override says, one word for each start.

Words: `dies` (killed), `worker` (a worker died), `refused`, `nan`, `done`, `saves` (before any of them), `waits` (until
it is asked to end). The folder of the run is in the second override.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

_EXIT = {"worker": ("failed: WorkerError", 1), "nan": ("failed: NonFiniteError", 1), "done": ("completed", 0)}


def main(command: str, words: str, run: str, *resume: str) -> int:
    folder, start = Path(run), int(os.environ["MEGAPPO_RESTARTS"])
    with (folder / "starts").open("a") as file:
        print(command, start, *resume, file=file)
    for word in words.split(",")[start].split("+"):
        if word == "saves":
            (folder / "checkpoints" / f"step_{start + 1:06d}").mkdir(parents=True)
        elif word == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "waits":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
            (folder / "waiting").touch()
            time.sleep(60)
        elif word == "refused":
            return 2
        else:
            reason, code = _EXIT[word]
            (folder / "summary.json").write_text(json.dumps({"exit": reason}))
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
