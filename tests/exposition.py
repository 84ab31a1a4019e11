"""Names of exported metrics, and Prometheus' own tool."""

import ast
import re
import shutil
from pathlib import Path

import pytest

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (package prometheus)"
)


def families(text: str) -> set[str]:
    """Return the names of all series of a scrape, families without samples included."""
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
        names |= {f"{name}_{end}" for end in ("bucket", "count", "sum")} if kind == "histogram" else {name}
    return names


def counters_of_the_plugin() -> list[str]:
    """Return the names of the plugin's counters from its source, because its import needs vLLM."""
    source = Path(__file__).parents[1] / "host_control" / "vllm" / "metrics.py"
    assigned = [each.value for each in ast.parse(source.read_text()).body if isinstance(each, ast.AnnAssign)]
    tables = [each for each in assigned if isinstance(each, ast.Dict)]
    names = [name for table in tables for name in ast.literal_eval(table)]
    assert len(tables) == 2 and len(names) > 10
    return names
