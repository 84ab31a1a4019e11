"""What a benchmark's figures depend on is found out from its code; figures of other code are named."""

import importlib.machinery
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from shadowserve_tools import provenance

REPOSITORY = provenance.REPOSITORY
SOURCES = {
    "shadowserve_tools/__init__.py": "",
    "shadowserve_tools/bench/__init__.py": "",
    "shadowserve_tools/bench/mine.py": 'from core import area\n\nCHILD = "child.engine"\nprint(area.size())\n',
    "shadowserve_tools/bench/other.py": "",
    "core/__init__.py": "from core import area\n",
    "core/area/__init__.py": "from core.area._one import size\nfrom core.area._two import count\n",
    "core/area/_one.py": '"""Sizes."""\n\n\ndef size():\n    return lib.ss_size()  # in bytes\n',
    "core/area/_two.py": "def count():\n    return lib.ss_count()\n",
    "child/__init__.py": "",
    "child/engine.py": "def run():\n    import child.late\n",
    "child/late.py": "",
    "native/include/public.h": "int ss_size(void);\n",
    "native/src/sizes/sizes.c": '#include "public.h"\n#include "shapes/shapes.h"\nint ss_size(void) { return 1; }\n',
    "native/src/shapes/shapes.h": "/* shapes */\n",
    "native/src/counts/counts.c": "int ss_count(void) { return 1; }\n",
}
OF_MINE = {
    *("shadowserve_tools/bench/mine.py", "core/area/_one.py", "child/engine.py", "child/late.py"),
    *("native/include/public.h", "native/src/sizes/sizes.c", "native/src/shapes/shapes.h"),
}


def digest(monkeypatch: pytest.MonkeyPatch, root: Path, changes: dict[str, str]) -> str | None:
    for name, text in (SOURCES | changes).items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(provenance, "REPOSITORY", root)
    assert {str(file.relative_to(root)) for file in provenance.sources("mine")} == OF_MINE
    return provenance.digest("mine")


@pytest.mark.parametrize("name", sorted(OF_MINE))
def test_a_change_of_what_a_benchmark_runs_changes_its_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    more = "print(1)\n" if name.endswith(".py") else "int more;\n"
    changes = {name: SOURCES[name] + more}
    assert digest(monkeypatch, tmp_path / "a", {}) != digest(monkeypatch, tmp_path / "b", changes)


def test_neither_comments_nor_what_a_benchmark_does_not_run_change_its_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changes = {
        "core/area/_one.py": '"""Said better."""\n\n\ndef size():\n    """Return it."""\n    return lib.ss_size()\n',
        "native/src/shapes/shapes.h": "/* shapes, said\n   better */\n",
        "core/area/_two.py": "def count():\n    return 2\n",
        "native/src/counts/counts.c": "int ss_count(void) { return 2; }\n",
        "shadowserve_tools/bench/other.py": "print(1)\n",
    }
    assert digest(monkeypatch, tmp_path / "a", {}) == digest(monkeypatch, tmp_path / "b", changes)


def test_programs_and_engines_that_a_benchmark_starts_are_among_its_sources() -> None:
    def names(bench: str) -> set[str]:
        return {str(file.relative_to(REPOSITORY)) for file in provenance.sources(bench)}

    started = {"storage_kv/server.py", "dpu_dataplane/service.py", "native/src/pipeline/pipeline.c"}
    assert started <= names("fetch")
    assert {"shadowserve_tools/bench/parts/engine.py", "host_control/vllm/connector.py"} <= names("interference")
    assert {"native/src/index/index.c", "shadowserve_tools/bench/index.py"} <= names("index")
    assert not {"native/src/pipeline/pipeline.c", "native/src/codecs/codec.c"} & names("index")


def test_figures_of_other_code_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = importlib.machinery.SourceFileLoader("gen_bench_docs", str(REPOSITORY / "scripts" / "gen-bench-docs"))
    spec = importlib.util.spec_from_loader("gen_bench_docs", loader)
    assert spec is not None
    script: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(script)
    results = {"index": {"sources": provenance.digest("index")}, "recovery": {"sources": "of then"}, "pool": {}}
    monkeypatch.setattr(script, "load", results.get)
    assert script.outdated() == ["recovery", "pool"]
