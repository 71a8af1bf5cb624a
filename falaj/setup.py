"""Commands of a new installation: `setup` builds what no registry has, `demo` runs an example."""

import importlib
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

from falaj.context import Here, Shown, row
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import USE_CASE_FILE

EXAMPLES = Path(__file__).with_name("examples")  # in a checkout a link to feature_repo
Template = Literal["table", "events", "timeseries", "flights", "traffic"]
"""What `falaj init` begins with: a question about a table of one's own, or an example."""


def setup(*, nccl: bool = False) -> None:
    """Build Horovod for the installed PyTorch, into this environment; needs a C++ compiler.

    The wheel is kept in the user's cache: another environment with the same PyTorch, Python and
    compiler takes it from there.

    Args:
        nccl: For GPUs too; needs a PyTorch built for CUDA and a CUDA toolkit.

    Examples:
        falaj setup
    """
    from infra.provision.machine import SetupError
    from infra.setup import set_up_horovod
    from tasks.kernel.extras import require_extras

    require_extras("train", "build")
    try:
        set_up_horovod(Path(sys.prefix), Path(sys.executable), nccl)
    except SetupError as exc:
        raise ConfigurationError(str(exc)) from exc
    importlib.invalidate_caches()  # what was installed can be imported by this process


def copy_example(name: str, folder: Path) -> None:
    """Copy a shipped project into a new folder, or one that holds a state folder at most.

    Raises:
        ConfigurationError: something is in the folder.
    """
    if folder.is_file() or (folder.is_dir() and {p.name for p in folder.iterdir()} - {".falaj"}):
        raise ConfigurationError(
            f"{folder} is there already and is not empty; name another folder. Nothing was written"
        )
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(EXAMPLES / name, folder, ignore=ignored, dirs_exist_ok=True)


def demo(
    *,
    folder: Path = Path("falaj-demo"),
    example: Literal["flights", "traffic"] = "flights",
    context: Here,
) -> Shown:
    """Copy an example project and run its whole loop; ends with the report's place.

    Horovod is built first where this environment has none. Call it again to resume.

    Args:
        folder: The new project.
        example: `flights`: will a flight be late? `traffic`: how many vehicles will pass?

    Examples:
        falaj demo
        falaj demo --example traffic --folder traffic
    """
    from falaj.loop import run
    from tasks.kernel.extras import has_horovod, require_extras

    require_extras("train", "convert", "examples")
    folder = folder.resolve()
    if (folder / USE_CASE_FILE).is_file():
        print(f"{folder} is a project already: its loop is run, or resumed")
    else:
        copy_example(example, folder)
        print(f"The example {example!r} is now the project {folder}")
    if not has_horovod():
        print("Horovod, by which the ranks of a training work together, is not here yet:")
        setup()
    os.environ["FALAJ_FEATURE_REPO"] = str(folder)
    print("Now the loop: features, training, judging, conversion, promotion, drift, report")
    shown = run(context=context)
    where = row("Project", f"{folder}; in it, `falaj status` and all other commands work")
    return replace(shown, lines=[*shown.lines, where])
