"""Releases end to end: flows on a real Prefect API, a real registry, ledger and admin interface."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from falaj import __main__ as command
from flows import release as release_module
from flows.config import PipelineConfig, read_pipeline_config
from flows.release import release_by_hand_flow, release_flow
from tasks.contracts.rollout import Action, Shares
from tasks.governance.identity import TOKEN_FILE
from tasks.kernel.errors import AccessError
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT, Settings
from tasks.release.config import ReleaseConfig
from tasks.release.ledger import ReleaseLedger
from tasks.release.records import Decision, Release
from tasks.release.rollout import Cycle, Releasing
from tasks.release.traffic import ServerTraffic, Traffic
from tests.support.host.processes import python, wait_until
from tests.support.registry.builders import World, comparison, migrated
from tests.support.release.builders import (
    MODEL,
    STEPS,
    FakeChampions,
    FakeGateway,
    FakeTraffic,
    Rows,
)
from tests.support.services.prefect_platform import PrefectApi, shown
from tests.support.services.servers import postgres_server
from tests.support.services.sign_in import provider, write_sign_in
from tests.support.serving.admin_server import AdminServer, admin_server
from tests.support.serving.served_rows import entity_batch, open_log, served

__all__ = ["migrated"]  # a fixture
LIMIT_S = 120


@dataclass
class Town:
    """One installation: version 2 has replaced version 1 in the registry, not yet on the server."""

    home: Path
    world: World
    server: AdminServer
    config: PipelineConfig
    gateway: FakeGateway = field(default_factory=FakeGateway)

    @property
    def ledger(self) -> ReleaseLedger:
        return ReleaseLedger(f"sqlite:///{self.home / 'operation' / 'operation.db'}")

    @property
    def release(self) -> Release:
        return self.ledger.last_release(MODEL)

    def traffic(self, settings: Settings) -> Traffic:
        return ServerTraffic(settings.home, self.gateway)

    def serve(self, number: int, error: float = 0.0, name: str = "part-0") -> None:
        """Requests of the step that is under way, of both versions."""
        shares = self.release.periods[-1].shares
        rows, step = Rows(seed=self.release.step), f"{self.release.step}-"
        usual = {"start": datetime.now(UTC), "apart_s": 1e-6}
        track, ids = ("shadow", step) if shares.mirror else ("candidate", f"c{step}")
        mine = number if shares.mirror else int(number * shares.candidate / 100)
        rows.add(number if shares.mirror else number - mine, ids=step, **usual)
        rows.add(mine, track=track, version="2", error=error, ids=ids, **usual)
        rows.write(self.home, f"part-{self.release.step}-{name}")

    def ask(self, number: int) -> pd.DataFrame:
        """Requests that name flights, with copies; labels by which the candidate guesses.

        What it answers is distributed as what the version before answers.
        """
        rng = np.random.default_rng(7)
        late = (rng.random(number) < 0.3).astype(float)
        scores = 1 / (1 + np.exp(-(rng.normal(size=number) + 2 * late)))
        keys = {"carrier": ["UA"] * number, "flight": list(range(number))}
        ids, arrived = [f"q{n}" for n in range(number)], datetime.now(UTC)
        with open_log(self.home) as log:
            for by, answer in (
                (served("1"), scores),
                (served("2", "shadow"), rng.permutation(scores)),
            ):
                log.served(entity_batch(ids, keys, arrived, by, answer.astype(np.float32)))
        moment = self.config.clock.shows(arrived) - timedelta(minutes=1)
        return pd.DataFrame({**keys, "event_timestamp": moment, "label": late})


@pytest.fixture
def town(tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Town]:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    monkeypatch.delenv("FALAJ_DATABASE_URL", raising=False)
    world = World.at(tmp_path).with_database_of(migrated)
    world.promoted(0)
    world.promoted(1, against=(comparison("champion:1", 0.004),))
    config = read_pipeline_config(PROJECT_ROOT / DEFAULT_FEATURE_REPO)
    steps = tuple(s.model_copy(update={"min_minutes": 0, "min_requests": 200}) for s in STEPS)
    fast = config.release.model_copy(update={"steps": steps, "settle_s": 0, "sticky": False})
    with admin_server(tmp_path) as server:
        town = Town(tmp_path, world, server, config.model_copy(update={"release": fast}))
        monkeypatch.setattr(release_module, "traffic_of", town.traffic)
        yield town


def evaluated(town: Town, cycles: int = 1) -> Cycle:
    """What the flow finds while a release is open."""
    found = release_flow(town.config, cycles=cycles)
    assert isinstance(found, Cycle)
    return found


@pytest.mark.timeout(300)
def test_a_good_version_takes_over_step_by_step_by_itself(
    prefect_api: PrefectApi, town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prefect_api.in_process():
        assert release_flow(town.config) is None
        assert town.release.current.name == "shadow"
        assert town.gateway.given[-1] == Shares(mirror=1.0)
        assert evaluated(town).decision.rule == "too_few"
        for step in ("shadow", "quarter"):
            assert town.release.current.name == step
            town.serve(1000)
            found = evaluated(town)
            assert found.decision.action is Action.PROMOTE, found.decision
        town.serve(1000)
        monkeypatch.setattr(release_module, "CYCLE_S", 0.0)
        last = evaluated(town, cycles=9)  # ends with the release
        assert last.decision.action is Action.PROMOTE
        assert release_flow(town.config, cycles=9) is None
    assert town.release.state == "released"
    assert town.server.tracks == {"stable": "2", "candidate": None, "shadow": None}
    assert town.gateway.given[-1].candidate == 0
    assert town.world.champion == 2


@pytest.mark.timeout(300)
def test_a_version_that_fails_goes_back_and_so_does_the_alias(
    prefect_api: PrefectApi, town: Town
) -> None:
    with prefect_api.in_process():
        release_flow(town.config)
        town.serve(1500, error=0.1)
        found = evaluated(town)
        assert (found.decision.action, found.decision.rule) == (Action.ROLL_BACK, "errors")
        assert release_flow(town.config) is None  # and is not released again by itself
        picture, evidence = (str(shown(k)[-1].data) for k in ("release", "release-evidence"))
    assert town.server.tracks["stable"] == "1"
    assert town.world.champion == 1
    assert town.release.state == "rolled_back"
    assert "WORSE" in evidence
    assert "data:image/svg+xml;base64," in picture
    page = (town.home / "release" / f"{MODEL}.html").read_text()
    assert "Rolled back: version 1 answers all requests" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_labels_that_name_entities_roll_a_worse_version_back(
    prefect_api: PrefectApi, town: Town
) -> None:
    with prefect_api.in_process():
        release_flow(town.config)
        labels, file = town.ask(2000), town.home / "labels.parquet"
        before = evaluated(town)
        assert before.decision.action is Action.PROMOTE  # nobody knows better yet
        labels.to_parquet(file, index=False)
        assert command.main(["predictions", "label", MODEL, str(file)]) == 0
        found = evaluated(town)
    assert (found.decision.action, found.decision.rule) == (Action.ROLL_BACK, "harm")
    assert [one.metric for one in found.evidence.harms] == ["task_paired"]
    assert found.evidence.num_labels == 2000
    assert town.world.champion == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_person_does_each_by_form_and_by_command_under_a_name(
    prefect_api: PrefectApi, town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    with prefect_api.in_process():
        assert release_by_hand_flow("start", "Amal", town.config, "before the fair")
        assert release_by_hand_flow("hold", "Amal", town.config, "lunch").held_by == "Amal"
        town.serve(1000)
        assert evaluated(town).decision.rule == "held"
    assert command.main(["release", "resume", "--approver", "Badr"]) == 0
    assert command.main(["release", "promote", MODEL, "--approver", "Badr"]) == 0
    assert town.release.step == 1
    assert command.main(["release", "rollback", "--approver", "Badr", "--comment", "odd"]) == 0
    assert command.main(["release", "hold", "--approver", "Badr"]) == 4
    said = capsys.readouterr()
    assert "no release of flight-delay is open" in said.err
    assert town.world.champion == 1
    assert command.main(["release", "status"]) == 0
    status = capsys.readouterr().out
    assert "rolled back" in status
    assert "roll_back (by_hand) by Badr: Badr: odd" in status
    assert "start (start) by Amal: before the fair" in status
    assert command.main(["release", "start", "--approver", "Badr", "--comment", "again"]) == 4
    assert "is what serves already" in capsys.readouterr().err
    assert command.main(["release", "status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    actors = [e["actor"] for e in told["entries"] if e["rule"] == "by_hand"]
    assert actors == ["Amal", *["Badr"] * 3]
    trail = "".join(f.read_text() for f in (town.home / "audit").glob("*.jsonl"))
    assert trail.count("change-release") >= 5
    assert '"outcome":"refused: DataContractError F300"' in trail


def test_two_people_let_a_release_begin_where_people_sign_in(
    prefect_api: PrefectApi, town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = town.home / "token"
    monkeypatch.setenv(TOKEN_FILE, str(token))
    with provider() as issuer:
        write_sign_in(town.home, issuer.issuer)
        begun: list[bool] = []
        for name, role in (("noor", "approver"), ("noor", "approver"), ("ali", "approver")):
            token.write_text(issuer.token(role, sub=name))
            assert command.main(["release", "start", "--approver", "Badr"]) == 2
            assert command.main(["release", "start"]) == 0
            begun.append(town.ledger.open_release(MODEL) is not None)
        assert begun == [False, False, True]
        token.write_text(issuer.token("operator", sub="omar"))
        assert command.main(["release", "hold"]) == 2
        with prefect_api.in_process(), pytest.raises(AccessError):
            release_by_hand_flow("hold", "Amal", town.config)


PROGRAM = """
import sys
from pathlib import Path
from tasks.release.ledger import ReleaseLedger
from tasks.release.rollout import Releasing
from tasks.release.traffic import ServerTraffic
from tests.support.release.builders import FakeChampions

home = Path(sys.argv[1])
ledger = ReleaseLedger(f"sqlite:///{home / 'operation' / 'operation.db'}")
releasing = Releasing(ledger, ServerTraffic(home), FakeChampions())
releasing.act_by_hand("flight-delay", "roll_back", "Amal", "")
"""


def test_killed_while_traffic_moves_the_next_run_finishes_the_move(
    prefect_api: PrefectApi, town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_module, "traffic_of", lambda _: ServerTraffic(town.home))
    with prefect_api.in_process():
        release_flow(town.config)
        assert town.release.current.name == "all"
        assert town.server.tracks["stable"] == "2"
        town.server.hangs_s = 60.0
        with python("-c", PROGRAM, str(town.home)) as process:
            wait_until(lambda: len(town.server.asked) >= 2, "the move has begun", LIMIT_S)
            process.send_signal(signal.SIGKILL)
        town.server.hangs_s = 0.0
        assert town.server.tracks["stable"] == "2"
        assert (town.release.state, town.release.is_moved) == ("rolled_back", False)
        assert release_flow(town.config) is None
    assert town.release.is_moved
    assert town.server.tracks["stable"] == "1"
    assert town.world.champion == 1


def test_without_a_server_nothing_is_done(prefect_api: PrefectApi, town: Town) -> None:
    (town.home / "serving" / "server.json").unlink()
    with prefect_api.in_process():
        assert release_flow(town.config) is None
    assert town.ledger.last_release(MODEL) is None


def test_on_postgresql_one_of_many_openers_and_one_of_two_deciders_is_heard(tmp_path: Path) -> None:
    with postgres_server(tmp_path) as url:
        ledger, config = ReleaseLedger(url), ReleaseConfig(steps=STEPS)

        def begin(number: int) -> str:
            release = ReleaseLedger(url).open(MODEL, "1", "2", config, "a", can_split=True)
            return release.release_id

        with ThreadPoolExecutor(6) as pool:
            assert len(set(pool.map(begin, range(6)))) == 1
        releasing = Releasing(ledger, FakeTraffic(), FakeChampions())
        seen = releasing.settle(ledger.open_release(MODEL))
        back = Decision(action=Action.ROLL_BACK, rule="harm", reason="worse")
        on = Decision(action=Action.PROMOTE, rule="passed", reason="as good")
        with ThreadPoolExecutor(2) as pool:
            ends = list(pool.map(lambda v: ledger.decide(seen, v, v.rule), (back, on)))
        assert {end.generation for end in ends} == {2}
        assert len(ledger.entries(seen.release_id)) == 2
        after = releasing.settle(ledger.release(seen.release_id))
        assert after.is_moved
        assert after.periods[0].until is not None
