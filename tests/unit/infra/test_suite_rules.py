"""A test module is only tests: what several share lies in tests/support."""

from __future__ import annotations

import re

from tasks.kernel.settings import PROJECT_ROOT

TESTS = PROJECT_ROOT / "tests"
IMPORTS = re.compile(r"^\s*(?:from|import)\s+(?:tests\.(?!support)[\w.]*|\.[\w.]*)", re.MULTILINE)


def test_no_module_imports_a_test_module_or_a_conftest() -> None:
    wrong = [
        f"{path.relative_to(PROJECT_ROOT)}: {found[0].strip()}"
        for path in sorted(TESTS.rglob("*.py"))
        for found in IMPORTS.finditer(path.read_text())
    ]
    assert not wrong, "put what they share into tests/support/<area>:\n" + "\n".join(wrong)


def test_every_helper_lies_in_support() -> None:
    common = ("test_", "conftest.py", "__init__.py")
    wrong = [
        path.relative_to(PROJECT_ROOT)
        for path in TESTS.rglob("*.py")
        if not path.name.startswith(common) and TESTS / "support" not in path.parents
    ]
    assert wrong == []
