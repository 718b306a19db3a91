"""The table of busy processes at the end of a run."""

from megappo.observability.busy_table import BusyTable


def test_shares_are_means_over_steps_by_process_and_over_processes_by_role() -> None:
    table = BusyTable()
    table.add({"reward/mean": 1.0})
    assert table.rows() == []
    table.add({"perf/busy_share/engine_0": 0.5, "perf/busy_share/actor_0": 0.2, "perf/busy_share/actor_1": 0.4})
    table.add({"perf/busy_share/engine_0": 0.7, "perf/busy_share/actor_0": 0.4, "perf/busy_share/actor_1": 0.4})
    assert table.rows() == [
        ("engine", "1", "60%", "60% (engine_0)", "60% (engine_0)"),
        ("actor", "2", "35%", "30% (actor_0)", "40% (actor_1)"),
    ]
