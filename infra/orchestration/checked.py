"""What a work pool runs: the flow run, where the worker shares the state of its platform.

One that does not would read nothing, or finish a stage where nobody looks. So it takes no work: the
run counts as cut off, and is started again on another worker.
"""

import os
import sys
from collections.abc import Sequence

from tasks.kernel.errors import FalajError
from tasks.kernel.settings import Settings
from tasks.metadata.database import USED, held_everywhere
from tasks.metadata.identity import check_state

EXIT_WRONG_STATE = 3


def main(command: Sequence[str]) -> int:
    """Become the engine of the flow run; returns only where that must not be.

    Args:
        command: what runs it; by default what Prefect's process worker does.
    """
    words = [*command] or [sys.executable, "-m", "prefect.engine"]
    try:
        settings = Settings.from_environment()
        check_state(settings)
        with held_everywhere(settings.home / USED, shared=True) as descriptors:
            for each in descriptors:
                os.set_inheritable(each, True)
            os.execvp(words[0], words)
    except FalajError as exc:
        sys.stderr.write(f"{type(exc).code}: {exc}\n")
        return EXIT_WRONG_STATE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
