"""What signals do to the processes of a launch."""

import os
import time

import pytest

from megappo.launch.children import Child


@pytest.mark.parametrize(("ignores", "code"), [(False, 128 + 10), (True, 7)])
def test_a_process_may_ignore_what_slurm_sends_to_all_and_so_does_what_it_starts(ignores: bool, code: int) -> None:
    program = "kill -USR1 $$; kill -USR2 $$; bash -c 'kill -USR1 $$; exit 7'"
    child = Child(["bash", "-c", program], environment=os.environ, ignores_signals=ignores)
    while (ended := child.poll()) is None:
        time.sleep(0.01)
    child.end(grace_s=1.0)
    assert ended == code


def test_a_process_that_ignores_the_signals_of_a_run_ends_when_it_is_asked_to() -> None:
    child = Child(["sleep", "60"], environment=os.environ, ignores_signals=True)
    child.end(grace_s=30.0)
    assert child.poll() == 128 + 15
