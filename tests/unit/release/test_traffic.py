import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.contracts.rollout import Shares
from tasks.kernel.errors import ConfigurationError, DataContractError, TransientError
from tasks.release.config import ReleaseConfig
from tasks.release.ledger import ReleaseLedger
from tasks.release.records import Wanted
from tasks.release.rollout import Releasing
from tasks.release.traffic import NotServedError, ServerTraffic, has_server, set_traffic
from tests.support.release.builders import MODEL, FakeChampions, FakeGateway
from tests.support.serving.admin_server import AdminServer, admin_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AdminServer]:
    with admin_server(tmp_path) as running:
        yield running


@pytest.mark.parametrize("champion", [None, "1"])
def test_no_release_is_due_while_the_server_serves_no_version_of_the_model(
    server: AdminServer, tmp_path: Path, champion: str | None
) -> None:
    server.is_empty = True
    traffic = ServerTraffic(tmp_path)
    releasing = Releasing(
        ReleaseLedger(f"sqlite:///{tmp_path / 'operation.db'}"),
        traffic,
        FakeChampions(champion, restored=champion is not None),
    )
    releasing.finish(MODEL)
    assert releasing.follow_roll_back(MODEL) is None
    assert not releasing.due(MODEL, ReleaseConfig())
    with pytest.raises(NotServedError):
        traffic.set_tracks(MODEL, {"stable": "1", "candidate": None, "shadow": None})


def test_a_version_is_loaded_before_requests_go_to_it(server: AdminServer, tmp_path: Path) -> None:
    gateway = FakeGateway()
    traffic = ServerTraffic(tmp_path, gateway)
    shared = Shares(candidate=5, mirror=100, sticky=True)
    step = Wanted(stable="1", candidate="2", shadow="2", shares=shared)
    assert set_traffic(traffic, MODEL, step)
    assert gateway.given[-1] == Shares(candidate=0.05, mirror=1.0, sticky=True)
    assert traffic.shares(MODEL) == shared
    assert not set_traffic(traffic, MODEL, step)
    assert len(server.asked) == 1
    assert set_traffic(traffic, MODEL, Wanted(stable="2"))
    assert server.asked[1:] == [{"stable": "2"}, {"stable": "2", "candidate": None, "shadow": None}]
    assert gateway.given[-1] == Shares()


def test_without_a_gateway_nothing_is_split(server: AdminServer, tmp_path: Path) -> None:
    traffic = ServerTraffic(tmp_path)
    assert not traffic.can_split
    traffic.set_shares(MODEL, Shares())
    with pytest.raises(ConfigurationError, match="no gateway"):
        traffic.set_shares(MODEL, Shares(candidate=5))


def test_each_refusal_is_a_sentence(server: AdminServer, tmp_path: Path) -> None:
    traffic = ServerTraffic(tmp_path)
    with pytest.raises(DataContractError, match="no version 9"):
        traffic.set_tracks(MODEL, {"stable": "9"})
    server.is_down = True
    with pytest.raises(TransientError, match="version 2 is not as recorded"):
        traffic.set_tracks(MODEL, {"stable": "2"})
    server.is_down, server.answers = False, {"versions": []}
    with pytest.raises(DataContractError, match="names no tracks"):
        traffic.tracks(MODEL)
    token = tmp_path / "serving" / "secrets" / "admin-token"
    token.write_text("another")
    with pytest.raises(ConfigurationError, match="does not accept the token"):
        traffic.tracks(MODEL)
    token.unlink()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        traffic.tracks(MODEL)


def test_a_server_that_is_away_is_tried_again(tmp_path: Path) -> None:
    traffic = ServerTraffic(tmp_path)
    assert not has_server(tmp_path)
    with pytest.raises(TransientError, match="no serving process is ready"):
        traffic.tracks(MODEL)
    with admin_server(tmp_path):
        pass
    with pytest.raises(TransientError, match="does not answer"):
        traffic.tracks(MODEL)
    (tmp_path / "serving" / "server.json").write_text(json.dumps({"pid": 1}))
    with pytest.raises(ConfigurationError, match="does not say where"):
        traffic.tracks(MODEL)


def test_one_decision_holds_for_all_serving_processes(tmp_path: Path) -> None:
    traffic = ServerTraffic(tmp_path, FakeGateway())
    with admin_server(tmp_path) as first, admin_server(tmp_path, 1) as second:
        second.tracks["stable"] = "3"  # it has missed something
        step = Wanted(stable="1", candidate="2", shadow="2", shares=Shares(candidate=5))
        assert set_traffic(traffic, MODEL, step)
        assert first.tracks == second.tracks == {"stable": "1", "candidate": "2", "shadow": "2"}
        assert not set_traffic(traffic, MODEL, step)
        second.is_down = True
        with pytest.raises(TransientError, match="could not set"):
            set_traffic(traffic, MODEL, Wanted(stable="2"))
        second.is_down = False
        assert set_traffic(traffic, MODEL, Wanted(stable="2"))
        assert first.tracks == second.tracks == {"stable": "2", "candidate": None, "shadow": None}


def test_a_process_that_was_killed_keeps_no_decision_from_the_others(tmp_path: Path) -> None:
    traffic = ServerTraffic(tmp_path)
    with admin_server(tmp_path):
        pass
    with admin_server(tmp_path, 1) as second:
        assert traffic.tracks(MODEL)["stable"] == "1"
        traffic.set_tracks(MODEL, {"stable": "2"})
        assert second.tracks["stable"] == "2"
