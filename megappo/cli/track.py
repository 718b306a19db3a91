"""`megappo track RUN`: sends the trackers of a run what they lack of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megappo.errors import MegappoError


# Any: argparse has no public type for what add_subparsers returns.
def add_track(commands: Any) -> None:
    """Add the command."""
    text = "send the trackers of a run what they lack, since they were away while it went on"
    parser = commands.add_parser("track", help=text, description=f"{text}. Exit code 1: one is still away.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, such as runs/NAME")
    overrides = "key=value of the section tracking, instead of what the run was started with"
    parser.add_argument("overrides", nargs="*", metavar="override", help=overrides)
    parser.set_defaults(command=lambda parsed: track(parsed.run, parsed.overrides))


def track(run: Path, overrides: Sequence[str]) -> int:
    """Bring every tracker of a run up to date; returns the exit code.

    Raises:
        ConfigError: an override cannot be applied.
        MegappoError: there is no run, or it is still going: then it does so itself.
    """
    from megappo.config.store import restore_run_config
    from megappo.observability.run_directory import RunDirectory, refuse_if_in_use
    from megappo.observability.run_files import RunFiles, tracker_status
    from megappo.observability.tracker_spec import TrackerSpec
    from megappo.observability.trackers import TRACKERS, title_of

    directory = RunDirectory(path=run)
    if not directory.config.exists():
        raise MegappoError(f"{run} is no folder of a run: it has no config.yaml (give one such as runs/NAME)")
    refuse_if_in_use(run)
    config = restore_run_config(directory.config.read_text(encoding="utf-8"), overrides).tracking
    files, code = RunFiles(directory), 0
    for name in config.trackers:
        try:
            tracker = TRACKERS.get(name)(TrackerSpec(config=config, run_name=run.resolve().name, directory=directory))
            last = tracker.catch_up(files)
            tracker.close(tracker_status(files.exit_reason()))
        except MegappoError:
            raise
        except Exception as error:  # somebody else's server or library, which may raise anything
            code = 1
            reason = str(error).partition("\n")[0]
            print(f"{title_of(name)} failed, the others go on: {type(error).__name__}: {reason}")
        else:
            print(f"{title_of(name)} has everything of {run} up to step {max(last, 0)}")
    return code
