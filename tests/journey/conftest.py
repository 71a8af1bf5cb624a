"""One short loop that all tests of the journey look at, serve from and go on with."""

import pytest

from tests.support.platform.loops import Loop, loop_repository


@pytest.fixture(scope="session")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    folder = tmp_path_factory.mktemp("loop")
    made = Loop(folder / "home", loop_repository(folder))
    assert str(made.home / "reports" / "latest" / "report.html") in made.succeed("run")
    return made
