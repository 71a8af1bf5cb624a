"""A supervisor of small children, in a process of its own: this module, with HOME CHILDREN.

CHILDREN is JSON: a list of fields of `Service`, "probe" being a file that must exist. The first
group to be stopped is all whose name begins with "worker".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.platform.children import Child, Service
from infra.platform.config import Place, PlatformConfig
from infra.platform.state import CutRun, PlatformState, ServiceState, only_supervisor, read_state
from infra.platform.supervisor import Supervisor
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.host.processes import wait_until

LIMIT_S = 120
SLEEP = [sys.executable, "-S", "-c", "import sys, time; time.sleep(600)"]


def make_child(place: Place, described: dict[str, Any]) -> Child:
    fields = {**described, "command": tuple(described["command"]), "environment": dict(os.environ)}
    if file := fields.pop("probe", None):
        fields["probe"] = lambda started: Path(file).exists()
    fields["needs"] = tuple(fields.get("needs", ()))
    return Child(Service(**fields), place.log(fields["name"]), grace_s=1)


def main(home: str, described: str) -> None:
    place = Place(Path(home))
    place.folder.mkdir(mode=0o700, exist_ok=True)
    children = [make_child(place, one) for one in json.loads(described)]
    names = {child.service.name for child in children}
    workers = frozenset(name for name in names if name.startswith("worker"))

    def after_group(number: int) -> list[CutRun]:
        with (place.home / "order").open("a") as order:
            order.write(f"group {number}\n")
        return [CutRun(id="1", name="some-run", state="CRASHED")] if number == 0 else []

    def forget_plans() -> bool:
        with (place.home / "forgotten").open("a") as told:
            told.write("asked\n")
        return (place.home / "forgotten").read_text().count("asked") > 1

    with only_supervisor(place):
        Supervisor(
            place=place,
            config=PlatformConfig(stop_grace_s=1, log_limit_bytes=10_000),
            children=children,
            stop_order=(workers, frozenset(names - workers)),
            after_group=after_group,
            on_up=lambda name: (place.home / f"up-{name}").touch(),
            planner="server",
            forget_plans=forget_plans,
            rotate_every_s=1,
        ).run()


def sleeper(mark: object) -> list[str]:
    """A command that sleeps, with `mark` on its command line."""
    return [*SLEEP, str(mark)]


class Supervised:
    """A supervisor in a process of its own."""

    def __init__(self, home: Path, process: subprocess.Popen[bytes]) -> None:
        self.place, self.process = Place(home), process

    def state(self) -> PlatformState | None:
        return read_state(self.place)

    def child(self, name: str) -> ServiceState:
        state = self.state()
        found = state.service(name) if state else None
        assert found, state
        return found

    def until(self, what: Callable[[PlatformState], object], said: str) -> None:
        def holds() -> object:
            assert self.process.poll() is None, f"the supervisor has ended: {self.said()}"
            state = self.state()
            return state and what(state)

        wait_until(holds, said, LIMIT_S)

    def until_up(self) -> None:
        self.until(lambda state: state.phase == "up", "all up")

    def said(self) -> str:
        return (self.place.home / "supervisor.log").read_text(errors="replace")


@contextmanager
def supervised(home: Path, *children: dict[str, Any]) -> Iterator[Supervised]:
    with (home / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(home), json.dumps(children)],
            cwd=PROJECT_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Supervised(home, process)
    finally:
        process.terminate()
        try:
            process.wait(LIMIT_S)
        finally:
            process.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
