"""What the crash tests run in processes of their own: one call, killed at a named step."""

import os
import signal
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NoReturn

from tasks.registry import model_folder
from tasks.registry.mlflow_registry import Registry
from tests.support.registry import builders

# Step of a call: the function that the process dies in, instead of running it.
REGISTER_STEPS: dict[str, tuple[object, str]] = {
    "run without anything": (Registry, "log"),
    "run without pictures": (builders, "draw"),
    "program without checkpoint": (model_folder, "_record"),
    "files without manifest": (model_folder, "_write_value"),
    "files without version": (Registry, "add_version"),
    "version, run not finished": (Registry, "end_run"),
    "version without alias": (Registry, "set_alias"),
}
ATTACH_STEPS: dict[str, tuple[object, str]] = {
    "folder not renamed": (Path, "rename"),
    "folders without list": (model_folder, "_write_value"),
    "list without tags": (Registry, "set_tags"),
    "old folders not removed": (model_folder, "remove_unlisted"),
}
PROMOTE_STEPS: dict[str, tuple[object, str]] = {
    "nothing recorded": (Registry, "run_folder"),
    "decision without tags": (Registry, "set_tags"),
    "decision without alias": (Registry, "set_alias"),
}


def die(*args: object, **kwargs: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def register_and_die(home: Path, step: str) -> None:
    world = builders.World.at(home)
    setattr(*REGISTER_STEPS[step], die)
    world.register()


def attach_and_die(home: Path, step: str, content: str) -> None:
    world = builders.World.at(home)
    ref, _ = world.register()
    made = builders.variants(world.store, ref.program_sha256, content)
    setattr(*ATTACH_STEPS[step], die)
    model_folder.attach_variants(ref, made, world.location, world.store)


def promote_and_die(home: Path, step: str) -> None:
    world = builders.World.at(home)
    ref, report = world.register()
    made = world.attach(ref)
    setattr(*PROMOTE_STEPS[step], die)
    world.promote(ref, report, made)


def register_together(home: Path, seed: int, start: Barrier) -> None:
    """Register one model that the other process registers too, and one of its own."""
    world = builders.World.at(home)
    start.wait(timeout=60)
    world.register(seed=0)
    world.register(seed=seed)
