"""Requests that can be read in two ways: one answer each, or the end of their connection."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import checked_config
from serving.protocol.front import Front
from serving.protocol.http.application import admin_listener, bound_socket, public_listener
from serving.protocol.http.pages import AdminPages
from serving.security.open_guard import OpenGuard
from tests.support.serving.inline_engine import InlineEngine
from tests.support.serving.odd_requests import ODD, PATH, UPGRADES, Odd
from tests.support.suite.examples import examples

INFER = PATH + b"/infer"
INDEX = b"/v2/repository/index"
TOKEN = "a-token-of-the-test"
Pieces = Sequence[bytes]


def listener_of(is_admin: bool) -> Any:
    config = checked_config({"http": {"request_timeout_s": 2}, "stop_s": 2}, "the test")
    engine = InlineEngine(lambda inputs: pytest.fail("a model was asked"))
    front = Front(engine, OpenGuard(config), config)
    if is_admin:
        return admin_listener(AdminPages(front, TOKEN, {}).application(), 2)
    return public_listener(front)


def statuses(asked: Sequence[Pieces], is_admin: bool = False) -> list[list[int]]:
    """What is answered on a connection for each, until its end; pieces are sent as they are."""

    async def one(port: int, pieces: Pieces) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            received = await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", received)]

    async def run() -> list[list[int]]:
        listener = listener_of(is_admin)
        sock = bound_socket("127.0.0.1", 0, "the test")
        serving = asyncio.ensure_future(listener.serve([sock]))
        try:
            return [await one(sock.getsockname()[1], pieces) for pieces in asked]
        finally:
            listener.should_exit = True
            await serving

    return asyncio.run(run())


def names_of(cases: Sequence[Odd], found: Sequence[list[int]], fits: Callable[..., bool]) -> Any:
    return {c.name: got for c, got in zip(cases, found, strict=True) if not fits(c, got)}


@pytest.mark.parametrize("path", [INFER, INDEX, b"/v2/nothing"])
def test_each_has_one_answer_or_costs_its_connection(path: bytes) -> None:
    def fits(case: Odd, got: list[int]) -> bool:
        last = [200] if case.taken else []  # pages and model refuse what the bodies are
        if path == INFER:
            return len(got) == case.num_answers and got[case.num_requests :] == last
        # A page that takes no body may close the connection instead of reading one.
        return 1 <= len(got) <= case.num_answers and got[case.num_requests :] in (last, [])

    found = statuses([[case.at(path)] for case in ODD])
    assert names_of(ODD, found, fits) == {}


@cache
def whole() -> list[list[int]]:
    return statuses([[case.at(INFER)] for case in ODD])


@examples(3)
@given(cuts=st.lists(st.integers(0, 400), max_size=12, unique=True))
def test_the_pieces_in_which_it_comes_change_nothing(cuts: list[int]) -> None:
    def pieces(data: bytes) -> Pieces:
        at = [0, *sorted(cuts), len(data)]
        return [data[a:b] for a, b in pairwise(at) if a < b]

    assert statuses([pieces(case.at(INFER)) for case in ODD]) == whole()


def test_the_admin_listener_too_answers_no_body() -> None:
    token = b"Authorization: Bearer " + TOKEN.encode()
    path = b"/admin/models/sums/load"
    found = statuses([[case.at(path, token)] for case in ODD], is_admin=True)
    assert names_of(ODD, found, lambda case, got: len(got) <= case.num_requests + 1) == {}
    upgrades = statuses([[case.at(path, token)] for case in UPGRADES[:3]], is_admin=True)
    assert upgrades == [[400, 404]] * 3
