"""A test module is only tests: what several share lies in tests/support, and nothing else does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tasks.kernel.settings import PROJECT_ROOT

TESTS = PROJECT_ROOT / "tests"
FOREIGN = PROJECT_ROOT / "infra" / "feast_suite.py"  # the tests there are those of Feast
CODE = ("falaj", "flows", "infra", "serving", "tasks")
A_TEST_MODULE = re.compile(r"tests(?:\.\w+)+|(?:.*\b)?(?:from|import) tests\b.*", re.DOTALL)
OF_TESTS = re.compile(r"\btests(?:\.\w+)*\.(?:test_\w+|conftest)\b")
# Quick to look for: without it, a file need not be parsed.
SUSPECT = re.compile(r"\bfrom\s+(?:tests(?!\.support)|\.)[\w.]*\s+import\b|" + OF_TESTS.pattern)
COMMON = {"conftest.py", "__init__.py"}


@cache
def modules() -> dict[str, Path]:
    """Files of the suite by the name under which each is imported."""
    files = sorted(TESTS.rglob("*.py"))
    return {".".join(f.relative_to(PROJECT_ROOT).with_suffix("").parts): f for f in files}


def named(text: str, module: str) -> Iterator[tuple[int, str]]:
    """Line and name of each test module or conftest that a module imports, or names in a text.

    A text may be the program of a process, or what a process is started with.
    """
    if not SUSPECT.search(text):
        return
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            whole = ".".join([*start, *filter(None, [node.module])])
            found = [whole, *(f"{whole}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value]
        names = {match[0] for one in found for match in OF_TESTS.finditer(one)}
        yield from ((node.lineno, name) for name in sorted(names - {module}))  # type: ignore[attr-defined]


def test_no_module_imports_a_test_module_or_a_conftest() -> None:
    known = modules()
    wrong = [
        f"{path.relative_to(PROJECT_ROOT)}:{line}: {name}"
        for module, path in known.items()
        for line, name in named(path.read_text(), module)
        if name in known
    ]
    assert not wrong, "put what they share into tests/support/<area>:\n" + "\n".join(wrong)


def test_every_helper_lies_in_support() -> None:
    wrong = [
        path.relative_to(PROJECT_ROOT)
        for path in modules().values()
        if not path.name.startswith("test_") and path.name not in COMMON
        if TESTS / "support" not in path.parents
    ]
    assert wrong == []


def imported_from_tests(text: str) -> list[int]:
    """Lines of code that import from the tests, or name such a module for a process to run."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                words = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                words = [f"{module}."]
            case ast.Constant(value=str(value)) if A_TEST_MODULE.fullmatch(value):
                words = ["tests"]
            case _:
                continue
        found += [node.lineno for word in words if word.split(".")[0] == "tests"]
    return found


def test_no_code_imports_from_the_tests() -> None:
    files = [file for name in CODE for file in (PROJECT_ROOT / name).rglob("*.py")]
    wrong = [
        f"{file.relative_to(PROJECT_ROOT)}:{line}"
        for file in files
        if file != FOREIGN and "tests" in (text := file.read_text())
        for line in imported_from_tests(text)
    ]
    assert not wrong, "tests import code, and code no tests: move what they share to the code"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("from tests.support.data import builders", [1]),
        ("import tests.support.suite", [1]),
        ("def f():\n    from tests import x", [2]),
        ("run('-m', 'tests.support.serving.v2_app')", [1]),
        ("P = 'import os; from tests.support import a'", [1]),
        ("FILE = 'tests/durations.json'\nfrom infra.tests import a\nfrom .tests import b", []),
        ("SAID = 'it tests. It imports tests that are slow'", []),
    ],
)
def test_each_way_to_import_from_the_tests_is_seen(text: str, lines: list[int]) -> None:
    assert imported_from_tests(text) == lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("from tests.unit.test_a import b", 1),
        ("\nfrom tests.unit import test_a", 2),
        ("import tests.unit.test_a", 1),
        ("from tests.unit.conftest import b", 1),
        ("from .test_a import b", 1),
        ("from . import test_a", 1),
        ("from ..unit.test_a import b", 1),
        ("def f():\n    run('-m', 'tests.unit.test_a')", 2),
        ("P = 'import sys; from tests.unit.test_a import *'", 1),
    ],
)
def test_each_way_to_import_a_test_module_is_seen(text: str, line: int) -> None:
    assert {at for at, _ in named(text, "tests.unit.test_b")} == {line}


def test_a_module_may_name_itself_and_import_what_is_no_test() -> None:
    text = "from tests.support.suite import promises\nENTRY = 'tests.unit.test_b.flow'\n"
    assert list(named(text, "tests.unit.test_b")) == []
