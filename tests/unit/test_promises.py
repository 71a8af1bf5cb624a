"""Each promise of the design and each complaint of people has a test or a drill."""

import re

from tasks.kernel.settings import PROJECT_ROOT
from tests.support.suite.promises import Promise


def test_no_promise_and_no_complaint_is_without_a_proof() -> None:
    text = "".join(file.read_text() for file in (PROJECT_ROOT / "tests").rglob("test_*.py"))
    assert set(re.findall(r"@proves\(\s*Promise\.(\w+)", text)) == set(Promise.__members__)
