"""A supervisor of small children, for tests, run as a module with arguments HOME CHILDREN.

CHILDREN is JSON: a list of fields of `Service`, "probe" being a file that must exist. The first
group to be stopped is all whose name begins with "worker".
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from infra.platform.children import Child, Service
from infra.platform.config import Place, PlatformConfig
from infra.platform.state import CutRun, only_supervisor
from infra.platform.supervisor import Supervisor


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


if __name__ == "__main__":
    main(*sys.argv[1:])
