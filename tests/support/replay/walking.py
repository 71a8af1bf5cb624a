"""A program that walks a small history in the state folder that it is given; prints the walk."""

import sys
from pathlib import Path

from flows.replay.models import retrain
from flows.replay.walk import walk
from tests.support.replay import worlds

DAYS = worlds.window(100, 150)


def main() -> None:
    """Walk, and print what happened."""
    history = worlds.history(Path(sys.argv[1]), worlds.rows(105))
    days = history.days(DAYS.start, DAYS.end)
    walked = walk(history, "controller", days, retrain(history, days[0], None))
    for act in walked.acts:
        sys.stdout.write(act.model_dump_json() + "\n")
    sys.stdout.write(repr(walked.results) + "\n")


if __name__ == "__main__":
    main()
