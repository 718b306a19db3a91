"""Two ends of a shared buffer, as two threads: the messages of the process group are a queue."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import Queue

import pytest
import torch

from megappo.errors import WorkerError
from megappo.models.shared_gather import BufferGuest, BufferOwner, new_buffer

CPU = torch.device("cpu")
RANK = 3


class Ends:
    """An owner and its guest, which have met."""

    def __init__(self, owner: BufferOwner, guest: BufferGuest) -> None:
        self.owner, self.guest = owner, guest
        invitations: Queue[torch.Tensor] = Queue()

        def receive(message: torch.Tensor) -> None:
            message.copy_(invitations.get(timeout=60))

        with ThreadPoolExecutor(1) as pool:
            invited = pool.submit(owner.invite, [RANK], lambda messages: invitations.put(messages[RANK]))
            self.written = guest.wait(receive)
            invited.result()


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    owner = BufferOwner(new_buffer(100, CPU), timeout_s=getattr(request, "param", 60.0))
    guest = BufferGuest(CPU, rank=RANK, timeout_s=60.0)
    with closing(owner), closing(guest):
        yield Ends(owner, guest)


def unused(_: object) -> None:
    raise AssertionError("an invitation is sent once")


def test_a_guest_writes_into_the_memory_of_the_owner_bucket_after_bucket(ends: Ends) -> None:
    for value in (1, 2, 3):
        if value > 1:
            ends.owner.invite([RANK], unused)
            assert ends.guest.wait(unused) is ends.written
        ends.written[40:60] = value
        ends.guest.done()
        ends.owner.wait([RANK])
        assert ends.owner.buffer[40:60].eq(value).all()


def test_an_owner_that_leaves_ends_the_wait_of_its_guest(ends: Ends) -> None:
    ends.guest.done()
    ends.owner.wait([RANK])
    ends.owner.close()
    with pytest.raises(WorkerError, match="the other rank has left"):
        ends.guest.wait(unused)


def test_a_guest_that_leaves_ends_the_wait_of_its_owner(ends: Ends) -> None:
    ends.guest.close()
    with pytest.raises(WorkerError, match="the other rank has left"):
        ends.owner.wait([RANK])
    with pytest.raises(WorkerError, match="cannot be told to go on"):
        ends.owner.invite([RANK], unused)


@pytest.mark.parametrize("ends", [2.0], indirect=True)
def test_a_guest_that_never_writes_is_waited_for_a_bounded_time(ends: Ends) -> None:
    with pytest.raises(WorkerError, match="waiting for the other rank: timed out"):
        ends.owner.wait([RANK])


def test_a_rank_that_never_comes_is_named() -> None:
    owner = BufferOwner(new_buffer(100, CPU), timeout_s=0.1)
    with pytest.raises(WorkerError, match=r"meeting ranks \[3\] at .*: timed out"):
        owner.invite([RANK], lambda _: None)
