"""Every metric has a row, and the page shows every row."""

import ast
import re
from pathlib import Path

from megappo.observability.metric_catalogue import CATALOGUE, MEASURED, catalogue_markdown, undocumented

ROOT = Path(__file__).resolve().parents[2]
METRIC = re.compile(r"(reward|rollout|actor|critic|kl|timing|perf|data|schedule|val|weights|correction)(/[a-z0-9_]+)+")


def metric_names(path: Path) -> set[str]:
    """Return the metric names written in a module, with `x` for what an f-string puts in."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            names.add("".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values))
    return {name for name in names if METRIC.fullmatch(name)}


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == catalogue_markdown(), "run `make docs`"


def test_no_metric_has_two_rows() -> None:
    names = [doc.name for docs in CATALOGUE.values() for doc in docs]
    assert len(names) == len(set(names))


def test_every_metric_named_in_the_code_is_documented() -> None:
    modules = [path for path in (ROOT / "megappo").rglob("*.py") if "observability" not in path.parts]
    named = {name: path.name for path in modules for name in metric_names(path)}
    missing = undocumented(named)
    assert missing == [], f"add rows to metric_catalogue.py: {[(name, named[name]) for name in missing]}"


def test_placeholders_stand_for_any_name() -> None:
    assert undocumented(["reward/format/mean", "reward/a/b/mean", "reward/mean"]) == []
    assert undocumented(["reward/format/median", "nowhere/x", "nowhere/x"]) == ["nowhere/x", "reward/format/median"]


def test_what_is_measured_in_time_is_named_so() -> None:
    docs = [doc for area in CATALOGUE.values() for doc in area]
    timed = [doc.name for doc in docs if doc.unit == "s" or doc.unit.endswith("/s")]
    assert timed and all(name.startswith(MEASURED) for name in timed)
