"""Traces: clocks of several machines on one scale, lanes, and the file that viewers read."""

import json
import random
import time
from typing import Any

from megappo.observability.chrome_trace import ProcessSpans, lanes_of, make_chrome_trace
from megappo.observability.clocks import Offset, Probe, offset_of, read_clock
from megappo.observability.spans import Span

HERE = Offset(0, 0)


def span(name: str, start_ns: int, end_ns: int, thread: str = "main") -> Span:
    return Span(name, thread, start_ns, end_ns)


def named(lanes: list[list[Span]]) -> list[list[str]]:
    return [[found.name for found in lane] for lane in lanes]


def test_the_shortest_round_trip_tells_the_offset_and_how_far_off_it_may_be() -> None:
    # The other clock is 1,000 ahead. The second question took 10 and was read in the middle; the first one, of 100, was
    # read at its very end, and alone would say 1,050.
    probes = [Probe(0, 1100, 100), Probe(200, 1205, 210), Probe(300, 1310, 340)]
    assert offset_of(probes) == Offset(1000, 5)


def test_the_true_offset_is_within_the_error() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ahead, probes, now = draw.randint(-(10**9), 10**9), list[Probe](), 0
        for _ in range(5):
            there, back = draw.randint(0, 10**6), draw.randint(0, 10**6)
            probes.append(Probe(now, now + there + ahead, now + there + back))
            now += there + back
        found = offset_of(probes)
        assert abs(found.ahead_ns - ahead) <= found.error_ns


def test_processes_of_one_machine_read_the_same_clock() -> None:
    before, reading, after = time.monotonic_ns(), read_clock(), time.monotonic_ns()
    assert before <= reading.now_ns <= after and reading.machine == read_clock().machine


def test_spans_that_nest_or_follow_each_other_share_a_lane() -> None:
    spans = [span("step", 0, 100), span("update", 10, 60), span("forward", 10, 20), span("save", 60, 100)]
    assert named(lanes_of(spans)) == [["step", "update", "forward", "save"]]


def test_spans_that_overlap_otherwise_get_lanes_beside_each_other() -> None:
    spans = [span("a", 0, 10), span("b", 5, 15), span("c", 8, 9), span("d", 10, 12), span("e", 16, 17)]
    assert named(lanes_of(spans)) == [["a", "c", "d", "e"], ["b"]]


def test_no_lane_holds_two_spans_that_cross() -> None:
    draw = random.Random(1)
    for _ in range(100):
        spans = [span(str(n), start := draw.randint(0, 50), start + draw.randint(1, 20)) for n in range(30)]
        lanes = lanes_of(spans)
        assert sorted(found.name for lane in lanes for found in lane) == sorted(found.name for found in spans)
        for lane in lanes:
            for first in lane:
                for second in lane:
                    crossing = first.start_ns < second.start_ns < first.end_ns < second.end_ns
                    assert not crossing


def events_of(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_a_trace_has_every_process_on_the_drivers_clock_and_cut_to_the_step() -> None:
    far = [Span("update", "main", 2_000_003_000, 2_000_009_000, {"mini_batch": 1}), span("old", 1, 2)]
    processes = [
        ProcessSpans(name="controller", spans=[span("step", 1_000, 11_000)], offset=HERE),
        ProcessSpans(name="actor_0", spans=far, offset=Offset(2_000_000_000, 750)),
        ProcessSpans(
            name="engine_0", spans=[span("requests", 0, 5_000, "loop"), span("x", 2_000, 20_000, "loop")], offset=HERE
        ),
    ]
    trace = json.loads(json.dumps(make_chrome_trace(processes, title="mine, step 3", start_ns=1_000, end_ns=11_000)))
    found = {
        (event["pid"], event["name"]): (event["ts"], event["dur"], event["tid"]) for event in events_of(trace, "X")
    }
    assert found == {
        (0, "step"): (0.0, 10.0, 0),
        (1, "update"): (2.0, 6.0, 0),
        (2, "requests"): (0.0, 4.0, 0),
        (2, "x"): (1.0, 9.0, 1),
    }
    (update,) = [event for event in events_of(trace, "X") if event["name"] == "update"]
    assert update["args"] == {"mini_batch": 1}
    names = {event["pid"]: event["args"]["name"] for event in events_of(trace, "M") if event["name"] == "process_name"}
    assert names == {0: "controller", 1: "actor_0", 2: "engine_0"}
    threads = [event["args"]["name"] for event in events_of(trace, "M") if event["name"] == "thread_name"]
    assert threads == ["main", "main", "loop", "loop (2)"]
    assert trace["otherData"]["clock error of actor_0"] == "0.001 ms"
