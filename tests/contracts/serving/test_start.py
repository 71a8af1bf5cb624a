"""What a serving process imports before it answers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tasks.settings import PROJECT_ROOT

pytestmark = pytest.mark.slow

IMPORTED = """
import sys, time
start = time.process_time()
import onnxruntime
one = time.process_time()
import typeguard
from serving.__main__ import import_feast
whole = typeguard.typechecked
before = time.process_time()
import_feast()
after = time.process_time()
import feast, serving.parts
assert "torch" not in sys.modules
assert typeguard.typechecked is whole
assert "TypeCheckMemo" not in feast.FeatureView.__init__.__code__.co_names
assert feast.FeatureStore.get_online_features.__code__.co_names
print((after - before) / (one - start))
"""


def test_feast_comes_without_pytorch_and_without_compiling_its_classes_again() -> None:
    """Its classes compiled again cost about 40 times of what ONNX Runtime's import does."""
    line = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(line, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 25, done.stdout
