"""Command `setup`: what no registry has is built into the present environment."""

import importlib
import sys
from pathlib import Path

from tasks.kernel.errors import ConfigurationError


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

    require_extras("train")
    try:
        set_up_horovod(Path(sys.prefix), Path(sys.executable), nccl)
    except SetupError as exc:
        raise ConfigurationError(str(exc)) from exc
    importlib.invalidate_caches()  # what was installed can be imported by this process
