"""Three use cases on one platform and one state folder: nobody touches what is another's.

The third is real data of another kind again, by a feature repository in a temporary folder and
nothing else. They are deployed by `falaj deploy`, and the loops run through their
deployments on real workers.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client

from infra.bench.parts import newest_record
from tasks.contracts.run import RunRecord
from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import Decision
from tasks.kernel.files import digest_of
from tasks.kernel.settings import Settings
from tests.support.data.use_cases import small_traffic, third_use_case
from tests.support.host.processes import run_python, wait_until
from tests.support.platform.deployed import is_final, wait_for_run
from tests.support.platform.loops import champion_of, loop_repository
from tests.support.services.prefect_platform import PrefectApi, prefect_api_server
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

LIMIT_S = 2400
POLICIES = {
    "flights": RetrainingPolicy(max_runs_per_week=0),
    "traffic": RetrainingPolicy(cool_down_hours=1),
    "energy": RetrainingPolicy(cool_down_hours=2),
}


@dataclass(frozen=True)
class Shared:
    """One platform, one state folder, and a feature repository for each use case."""

    api: PrefectApi
    client: SyncPrefectClient
    home: Path
    repos: Mapping[str, Path]

    def settings(self, use_case: str) -> Settings:
        return Settings(home=self.home, feature_repo=self.repos[use_case])

    def record(self, use_case: str) -> RunRecord:
        return newest_record(self.settings(use_case))

    def run_loops(self, *use_cases: str) -> None:
        """Run their deployments of the loop at one time; that of the first has a plain name."""
        runs = []
        for use_case in use_cases:
            name = "pipeline/pipeline" + ("" if use_case == "flights" else f"-{use_case}")
            found = self.client.read_deployment_by_name(name)
            assert found.parameters["config"]["name"] == use_case
            runs.append(self.client.create_flow_run_from_deployment(found.id).id)
        for run in runs:
            self.finish(run)

    def finish(self, run: UUID) -> None:
        done = wait_for_run(self.client, run, is_final, "the loop has ended", LIMIT_S)
        assert done.state.is_completed(), done.state.message

    def own_state(self, use_case: str) -> dict[str, str]:
        """Digest of each file that is this use case's alone."""
        home = self.settings(use_case).features_home
        folders = ("feast", "feature_tables", "monitoring", "reports", "audit")
        return {
            str(path.relative_to(home)): digest_of(path)
            for folder in folders
            for path in sorted((home / folder).rglob("*"))
            if path.is_file() and not path.name.endswith(("-wal", "-shm", "lock"))
        }

    def decisions(self, use_case: str) -> list[Decision]:
        ledger = Ledger(self.settings(use_case).metadata_url)
        return ledger.decisions(use_case=use_case)


def repositories(folder: Path) -> dict[str, Path]:
    """Each with a drift policy of its own."""
    flights = loop_repository(folder).path
    policies: dict[str, Any] = {
        name: {"retraining": policy.model_dump(mode="json")} for name, policy in POLICIES.items()
    }
    described = yaml.safe_load((flights / "use_case.yaml").read_text()) | policies["flights"]
    (flights / "use_case.yaml").write_text(yaml.safe_dump(described))
    return {
        "flights": flights,
        "traffic": small_traffic(folder, **policies["traffic"]),
        "energy": third_use_case(folder, **policies["energy"]),
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("side-by-side")
    repos = repositories(folder)
    with ExitStack() as stack:
        api = stack.enter_context(prefect_api_server(folder / "prefect"))
        stack.enter_context(api.in_process())
        client = stack.enter_context(get_client(sync_client=True))
        shared = Shared(api, client, folder / "home", repos)
        where = {"FALAJ_HOME": str(shared.home)}
        named = [word for repo in repos.values() for word in ("--repo", str(repo))]
        options = {"env": api.command_environment(**where), "timeout": LIMIT_S}
        run_python("-m", "falaj", "deploy", *named, **options, check=True)
        for pool in ("coordinator", "cpu"):
            stack.enter_context(api.worker(pool, **where))
        shared.run_loops("flights", "traffic")
        yield shared


@proves(Promise.TRACED, "two champions, each with its own data and report")
@proves(Promise.ONE_RETRAINING, "each by its own policy and cool-down")
def test_two_loops_at_one_time_end_with_two_champions_and_decisions(shared: Shared) -> None:
    for use_case, task in (("flights", "classification"), ("traffic", "regression")):
        record = shared.record(use_case)
        assert record.use_case == use_case
        assert record.promotion.promoted
        assert champion_of(shared.home, record.version.name).number == 1
        assert record.dataset.snapshot.columns.task == task
        # The drift checks of the loops told of their results; the automation started decisions.
        wait_until(
            lambda name=use_case: shared.decisions(name), f"no decision about {use_case}", 900
        )
        ledger = Ledger(shared.settings(use_case).metadata_url)
        for decision in shared.decisions(use_case):
            result = ledger.result(decision.result_id)
            assert result.policy == POLICIES[use_case]
            assert result.model == record.version.name


@proves(Promise.NO_FALLBACK, "the third is added, the others are as they were")
def test_a_third_by_its_feature_repository_alone_leaves_the_others_as_they_were(
    shared: Shared,
) -> None:
    before = {name: shared.own_state(name) for name in ("flights", "traffic")}
    assert all(len(files) > 5 for files in before.values())
    shared.run_loops("energy")
    assert {name: shared.own_state(name) for name in before} == before
    energy = shared.record("energy")
    assert energy.promotion.promoted
    assert energy.version.name == "weekly-rise"
    homes = {shared.settings(name).features_home for name in POLICIES}
    assert len(homes) == len(POLICIES)
