"""A writer of checkpoints is killed 30 times (`FALAJ_KILLS`), on a disk and on S3."""

import os
from pathlib import Path

import pytest

from tests.support.services.servers import s3_server
from tests.support.state import make_bucket
from tests.support.suite.promises import Promise, proves
from tests.support.training.checkpoint_writer import kill_and_look

pytestmark = [pytest.mark.drill, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("FALAJ_KILLS", "30"))
SEED = int(os.environ.get("FALAJ_KILLS_SEED", "0"))


@proves(Promise.INTERRUPT, "the newest checkpoint is whole")
def test_a_killed_writer_never_leaves_half_a_checkpoint_on_a_disk(tmp_path: Path) -> None:
    kill_and_look([str(tmp_path)], KILLS, SEED)


@proves(Promise.INTERRUPT, "the newest checkpoint is whole")
def test_a_killed_writer_never_leaves_half_a_checkpoint_on_s3() -> None:
    with s3_server() as endpoint:
        make_bucket(endpoint, "lake")
        kill_and_look([endpoint, "lake/run"], KILLS, SEED)
