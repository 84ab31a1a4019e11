"""Each pair of abilities has the result in docs/reference/combinations.md: it works, uses a named slower path, or is
refused.

``make test`` runs a few pairs, ``make combinations`` all of them: real vLLM, a real data plane, real storage.
"""

import ast
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from abilities import ABILITIES, PAIRS, Expected, expected, pairs, runs
from document import main

REPOSITORY = Path(__file__).parents[2]
FEW = [("groups", "waits"), ("pages", "binned"), ("pd", "tiers"), ("policy", "s3")]


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of a file's functions."""
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_exception_is_of_one_pair_and_says_why() -> None:
    for pair, found in PAIRS.items():
        assert set(pair) <= ABILITIES.keys() and pair[0] != pair[1]
        assert pair[::-1] not in PAIRS, "a pair has one entry"
        assert bool(found.detail) == (found.outcome != "works"), pair
        assert found != Expected(), f"{pair}: an entry equals the default"


def test_each_pair_is_run_or_names_a_test_that_exists() -> None:
    for first, second in pairs():
        found = expected(first, second)
        if runs(first, second) or found.outcome == "none":
            continue
        names = [found.test] if found.test else [ABILITIES[name].alone for name in (first, second)]
        for name in filter(None, names):
            file, _, function = name.partition("::")
            assert function in functions_of(file), name


def test_the_document_has_the_table() -> None:
    assert main(["--check"]) == 0


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("first", "second"), [pair for pair in pairs() if runs(*pair)] if os.environ.get("TEST_NIGHTLY") else FEW
)
def test_a_pair_does_what_the_table_says(first: str, second: str, tmp_path: Path, references: Any) -> None:
    from runner import observe

    found = observe(first, second, tmp_path, references)
    assert found.agrees(expected(first, second)), f"{first} + {second}: {found}"
