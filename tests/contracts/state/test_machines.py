"""Machines without a common folder share one state: S3, PostgreSQL and Redis.

Each has a network, a disk and a clock of its own. What they share is the software alone.
"""

import shutil
from collections.abc import Iterator

import pytest

from tests.support.host.clocks import make_clock
from tests.support.host.machines import DISK
from tests.support.host.processes import wait_until
from tests.support.platform.site import POOL, Site, builds_of, site
from tests.support.platform.whole_platform import FINAL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site"), ("far", "third")) as made:
        yield made


def test_a_worker_of_another_state_takes_no_work(shared: Site) -> None:
    far = shared.machines[0]
    shared.start_worker(far, FALAJ_STATE="s3://lake/another")
    wait_until(lambda: "location differ" in shared.log(far), "it is refused", 120)
    assert "FALAJ_STATE" in shared.log(far)
    far.kill()
    shared.start_worker(far, FALAJ_DATABASE_URL="")
    wait_until(lambda: "holds copies of the state" in shared.log(far), "it is refused", 120)
    far.kill()
    shutil.rmtree(far.disk / "home")
    shared.start_worker(far, FALAJ_DATABASE_URL="")
    wait_until(lambda: "database differ" in shared.log(far), "it is refused", 120)
    far.kill()
    assert not shared.platform.ask("POST", f"/work_pools/{POOL}/workers/filter", {})
    shutil.rmtree(far.disk / "home")


def test_a_machine_without_a_common_folder_takes_stages_and_a_third_one_finishes(
    shared: Site,
) -> None:
    far, third = shared.machines
    clock = make_clock(far.disk, DISK)
    clock.jump_to(1 / 60)
    loop = shared.start_loop()
    shared.start_worker(far, clock)
    wait_until(lambda: "epoch 1: " in shared.log(far), "it trains", 900)
    far.kill()
    shared.start_worker(third)
    ended = lambda: shared.platform.state_of(loop)["type"] in FINAL  # noqa: E731
    wait_until(ended, "the loop has ended", 1500)
    shared.platform.check_completed_once(loop)
    builds = builds_of([shared.platform.home, far.disk / "home", third.disk / "home"])
    assert {kind for kind, _ in builds} >= {"snapshots", "models", "variants"}
    assert set(builds.values()) == {1}, "nothing was built twice"
    assert (third.disk / "home" / "artifacts" / "models").is_dir()
    assert not list((third.disk / "home" / "artifacts").rglob(".staging*"))
