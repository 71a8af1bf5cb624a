import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.training.elastic.config import ElasticConfig
from tasks.training.elastic.discovery import (
    LONGEST_REST_S,
    Cooldown,
    Discovery,
    HostWatch,
    Slots,
    discovery_of,
    parse_hosts,
    ready_pods,
)
from tests.support.ranks.elastic import REMOTE
from tests.support.services.listeners import Answer, Asked, http_listener, json_answer


def test_a_hosts_file_names_slots_in_three_ways_and_may_hold_comments() -> None:
    text = "# our hosts\nh1\nh2:3  # the large one\n\nh3.example slots=4\nidle:0\n"
    assert parse_hosts(text, 2, "hosts") == {"h1": 2, "h2": 3, "h3.example": 4}
    for line in ("h1 slots=two", "h1:-1", "-oProxyCommand=evil", "h1 gpus=2", "a/b"):
        with pytest.raises(ConfigurationError, match=r"^hosts, line 2: .* is no host; expected"):
            parse_hosts(f"h0\n{line}\n", 1, "hosts")


def source(kind: str, place: str, **fields: object) -> Discovery:
    asked = {**REMOTE, "discovery": kind, "place": place, **fields}
    return discovery_of(ElasticConfig.model_validate(asked))


def test_a_hosts_file_is_read_again_and_hosts_that_do_not_answer_are_left_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "hosts"
    path.write_text("127.0.0.2\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        discovery = source("ssh", str(path), ssh_port=server.getsockname()[1])
        assert discovery() == {}
        path.write_text("127.0.0.2\n127.0.0.1\n")
        assert discovery() == {"127.0.0.1": 2}
    path.unlink()
    with pytest.raises(TransientError, match="cannot be read"):
        discovery()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("echo worker-0.job; echo worker-1.job:4", {"worker-0.job": 2, "worker-1.job": 4}),
        ('echo "host-${FALAJ_PASSWORD:-without}"', {"host-without": 2}),
    ],
)
def test_any_program_may_print_the_hosts_and_sees_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, hosts: Slots
) -> None:
    monkeypatch.setenv("FALAJ_PASSWORD", "secret")
    assert source("script", str(program(tmp_path, text)))() == hosts


def program(folder: Path, text: str) -> Path:
    path = folder / "discover_hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_program_that_fails_is_transient_and_says_what_it_printed(tmp_path: Path) -> None:
    path = program(tmp_path, "echo no such job >&2; exit 3")
    with pytest.raises(TransientError, match=r"status 3\. \(no such job\)"):
        source("script", str(path))()
    with pytest.raises(TransientError, match="did not print hosts"):
        source("script", str(tmp_path / "none"))()


def pod(name: str, ip: str, **changes: object) -> dict[str, object]:
    ready = {"type": "Ready", "status": changes.pop("ready", "True")}
    status = {"phase": changes.pop("phase", "Running"), "podIP": ip, "conditions": [ready]}
    metadata = {"name": name, "labels": {}, **changes.pop("metadata", {})}  # type: ignore[dict-item]
    return {"metadata": metadata, "spec": changes, "status": status}


PODS = [
    pod("w0", "10.0.0.1", hostname="job-worker-0", subdomain="job"),
    pod("w1", "10.0.0.2"),
    pod("w2", "10.0.0.3", ready="False"),
    pod("w3", "10.0.0.4", phase="Pending"),
    pod("w4", "10.0.0.5", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
]


def test_only_ready_pods_that_stay_are_hosts(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    seen: list[tuple[str, str]] = []

    def answer(asked: Asked) -> Answer:
        seen.append((asked.path, asked.headers["Authorization"]))
        return json_answer({"kind": "PodList", "items": PODS})

    with http_listener(answer) as url:
        found = ready_pods("ml/job-name=flights", 2, url, tmp_path)
    assert found == {"job-worker-0.job": 2, "10.0.0.2": 2}
    assert seen == [("/api/v1/namespaces/ml/pods?labelSelector=job-name%3Dflights", "Bearer abc")]
    with pytest.raises(TransientError, match="did not list the pods of ml"):
        ready_pods("ml/a=b", 2, "http://127.0.0.1:9", tmp_path)


def test_a_host_is_gone_only_after_several_looks_without_it() -> None:
    source = Mock(return_value={"h1": 1, "h2": 1})
    watch = HostWatch(source)
    watch.look()
    source.return_value = {"h1": 1}
    for _ in range(HostWatch.misses_to_be_gone - 1):
        watch.look()
        assert set(watch.slots) == {"h1", "h2"}
    watch.look()
    assert set(watch.slots) == {"h1"}
    source.side_effect = TransientError("away")  # which changes nothing
    watch.look()
    assert (watch.slots, watch.trouble) == ({"h1": 1}, "away")
    source.side_effect = None
    source.return_value = {"h1": 3}  # fewer or more slots count at once
    watch.look()
    assert watch.slots == {"h1": 3}


def test_a_place_rests_longer_with_each_failure_and_long_use_is_forgiven() -> None:
    cooldown = Cooldown(5)
    assert cooldown.punish("h1-0", 100.0) == 5
    assert cooldown.is_resting("h1-0", 104.9)
    assert not cooldown.is_resting("h1-0", 105.0)
    assert not cooldown.is_resting("h1-1", 101.0)
    assert cooldown.punish("h1-0", 110.0) == 10
    assert cooldown.punish("h1-0", 500.0) == 5
    rests = [cooldown.punish("h2-0", 0.0) for _ in range(3000)]
    assert rests[:8] == [5, 10, 20, 40, 80, 160, 300, 300]
    assert rests[-1] == LONGEST_REST_S


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"place": ""}, "needs place"),
        ({"interface": "lo"}, "needs an interface that other"),
        ({"ssh_known_hosts_file": None}, "needs ssh_known_hosts_file"),
        ({"min_ranks": 5, "max_ranks": 4}, "min_ranks=5 is above max_ranks=4"),
        ({"ssh_user": "-oProxyCommand=x y"}, "ssh_user"),
        ({"discovery": "kubernetes", "place": "ml"}, "needs place as namespace/label selector"),
    ],
)
def test_a_configuration_that_cannot_work_is_rejected_with_what_it_needs(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        ElasticConfig.model_validate({**REMOTE, **changes})
