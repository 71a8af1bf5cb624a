import itertools
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.kernel.errors import ConfigurationError
from tasks.training.elastic.driver import in_rank_order
from tasks.training.elastic.process import Member
from tasks.training.launch.rendezvous import Rendezvous, address_of, assignments


@dataclass
class Rank:
    host: str
    commit: int
    seniority: int


members = st.lists(
    st.builds(Rank, st.sampled_from(["a", "b", "c"]), st.integers(0, 3), st.integers(0, 1000)),
    min_size=1,
    max_size=12,
)


@given(members)
def test_ranks_of_a_host_follow_each_other_and_nobody_is_lost(ranks: list[Rank]) -> None:
    ordered = in_rank_order(cast(list[Member], ranks))
    key = repr
    assert sorted(ordered, key=key) == sorted(ranks, key=key)
    assert ordered[0].commit == max(rank.commit for rank in ranks)
    changes = [a.host != b.host for a, b in itertools.pairwise(ordered)]
    assert sum(changes) == len({rank.host for rank in ranks}) - 1
    slots = assignments([rank.host for rank in ordered])
    assert [(slot.rank, slot.hostname) for slot in slots] == [
        (number, rank.host) for number, rank in enumerate(ordered)
    ]


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ConfigurationError, match=r"no network interface 'wg7'.*it has .*lo"):
        address_of("wg7")


def test_the_rendezvous_is_on_its_one_address_and_gone_when_closed() -> None:
    rendezvous = Rendezvous(assignments(["localhost"]), "127.0.0.1")
    url = f"http://127.0.0.1:{rendezvous.port}/global/0"
    request = urllib.request.Request(url, data=b"address", method="PUT")
    urllib.request.urlopen(request, timeout=5).close()
    with urllib.request.urlopen(url, timeout=5) as answer:
        assert answer.read() == b"address"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", rendezvous.port), 5)
    rendezvous.close()
    rendezvous.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)
