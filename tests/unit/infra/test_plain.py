"""The loop without Prefect, which the bench measures against, takes every call the flows make."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from prefect import flow, task
from infra.bench.loop.plain import without_prefect

@task
def add(one: int, other: int) -> int:
    return one + other

@flow
def adding() -> int:
    state = add(1, other=1, return_state=True)
    return add(state.result(raise_on_failure=False), other=1)

without_prefect()
print(adding())
"""


@pytest.mark.slow
def test_flows_and_tasks_become_plain_calls_with_or_without_their_state() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (said.returncode, said.stdout.strip()) == (0, "3"), said.stderr
