"""Where the nodes of a launch meet before there is any Ray: a small store of texts at node 0.

It is torch.distributed's TCP store, which torchrun keeps already. Every key is written once, or by one node only, and
holds JSON. All waiting is polling, so that signals, the end of the launch and the loss of a node are seen within a
second, whatever is waited for.

Keys: `SUBJECT/RANK` what a node says, `SUBJECT` what node 0 says to all, `life/RANK` a number that grows while the node
lives, with the signals that it got.
"""

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from megappo.device.process_group import open_store
from megappo.launch.errors import LaunchError, NodeLostError
from megappo.launch.hosts import check_port, free_port
from megappo.launch.place import Place
from megappo.launch.signals import SignalCounts

_TICK_S = 0.2
_LIFE_S = 1.0
"""How often a node says that it lives."""
_ANSWER_S = 30.0
"""Longest wait for one answer of the store."""
_STORE_FAILURES = (DistError, RuntimeError)
"""What the store raises when node 0 is gone (DistError is a RuntimeError in today's torch)."""

# Any: what JSON holds.
Json = Any


class Meeting:
    """This node's side of the store.

    `name_of` gives a node's name for messages, by rank.

    Args:
        silence_s: a node that says nothing for so long is gone.
    """

    def __init__(self, store: Store, *, place: Place, signals: SignalCounts, silence_s: float) -> None:
        self._store = store
        self.silence_s = silence_s
        self.place = place
        self.name_of: Callable[[int], str] = place.name_of
        self._signals = signals
        self._life = 0
        self._next_life = 0.0
        self._heard: dict[int, tuple[int, float]] = {}
        """By rank: the last number that a node said, and when it was new here."""
        self._counts: dict[int, Mapping[str, int]] = {}
        self.clocks_ahead_s: dict[int, float] = {}
        """By rank: a node's clock less this one's, up to the time that a word takes (seconds at most)."""

    def say(self, subject: str, content: Json) -> None:
        """Tell the others of this node."""
        self._set(f"{subject}/{self.place.rank}", content)

    def say_to_all(self, subject: str, content: Json) -> None:
        """Tell all nodes, as node 0."""
        self._set(subject, content)

    def hear(self, key: str) -> Json | None:
        """Return what was said under a key, None as long as nobody has."""
        return self._get(key) if self._has(key) else None

    def tick(self) -> None:
        """Wait a moment, and say that this node lives. Raises NodeLostError: node 0 is gone."""
        time.sleep(_TICK_S)
        self._signals.look_at_parent()
        now = time.monotonic()
        if now >= self._next_life:
            self._life += 1
            self._next_life = now + _LIFE_S
            self.say("life", {"number": self._life, "signals": dict(self._signals.counts), "clock": time.time()})
            self._listen(now)

    def signal_counts(self) -> list[Mapping[str, int]]:
        """Return the signals that each node has got, of those that are known to this one."""
        others = [counts for rank, counts in self._counts.items() if rank != self.place.rank]
        return [Counter(self._signals.counts), *others]

    def silent(self) -> list[int]:
        """Return the nodes that have lived, and have said nothing for `silence_s`."""
        now = time.monotonic()
        return [rank for rank, (_, since) in self._heard.items() if now - since > self.silence_s]

    def _listen(self, now: float) -> None:
        """Hear who lives: node 0 listens to all, the others to node 0."""
        ranks = range(self.place.num_nodes) if self.place.rank == 0 else (0,)
        for rank in ranks:
            if rank == self.place.rank or (said := self.hear(f"life/{rank}")) is None:
                continue
            self._counts[rank] = said["signals"]
            if rank not in self._heard or self._heard[rank][0] != said["number"]:
                self._heard[rank] = (said["number"], now)
                self.clocks_ahead_s[rank] = said["clock"] - time.time()

    def _set(self, key: str, content: Json) -> None:
        self._ask(lambda: self._store.set(key, json.dumps(content)))

    def _get(self, key: str) -> Json:
        return json.loads(self._ask(lambda: self._store.get(key)))

    def _has(self, key: str) -> bool:
        return self._ask(lambda: self._store.check([key]))

    def _ask(self, question: Callable[[], Any]) -> Any:  # Any: whatever the store answers
        try:
            return question()
        except _STORE_FAILURES as error:
            raise NodeLostError(f"{self.name_of(0)} is gone: its store at {self.place.head} does not answer") from error


def open_meeting(place: Place, *, address: str, signals: SignalCounts, join_s: float, silence_s: float) -> Meeting:
    """Open the store on node 0, or find it within `join_s` from another node.

    Args:
        address: that of node 0.
        silence_s: see `Meeting`.

    Raises:
        LaunchError: the port is taken, and by whom; or nobody answers there in time.
        KeyboardInterrupt: a signal came meanwhile.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each failed try of a connection would be a warning
    timeout = timedelta(seconds=_ANSWER_S)
    opens = place.rank == 0 and not place.store_is_kept
    if opens:
        place = replace(place, port=place.port or free_port(address))
        check_port(address, place.port)
    else:
        _await_listener(place, address, signals=signals, join_s=join_s)
    # A world of one: nobody waits here for the others, since who is missing could not be told.
    connect = partial(open_store, address, place.port, world_size=1, is_first=opens, timeout=timeout)
    store = _within_limit(connect, signals)
    if store is None:
        raise LaunchError(
            f"what listens at port {place.port} of {place.head} is no meeting place of a launch (give the port that "
            "node 0 was given)"
        )
    return Meeting(PrefixStore(f"megappo/{place.job}", store), place=place, signals=signals, silence_s=silence_s)


def _within_limit(connect: Callable[[], Store], signals: SignalCounts) -> Store | None:
    """Return the store, or None where that does not come about: against a listener that is no store, torch waits for
    ever (TCPStore.cpp, the client's first query has no deadline)."""
    found: list[Store] = []

    def run() -> None:
        with suppress(*_STORE_FAILURES):
            found.append(connect())

    thread = threading.Thread(target=run, daemon=True, name="open-store")
    thread.start()
    deadline = time.monotonic() + _ANSWER_S
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_TICK_S)
        if signals.asked_to_end:
            raise KeyboardInterrupt
    return found[0] if found else None


def _await_listener(place: Place, address: str, *, signals: SignalCounts, join_s: float) -> None:
    deadline = time.monotonic() + join_s
    while True:
        try:
            socket.create_connection((address, place.port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{place.name_of(place.rank)} found nobody at port {place.port} of {place.head} ({address}) within "
                    f"{join_s:.0f} s: {error} (is node 0 running, is this its address, may this node connect to it?)"
                ) from error
        time.sleep(_TICK_S)
        if signals.asked_to_end:
            raise KeyboardInterrupt
