from __future__ import annotations

import msgspec
import pytest

from tasks.training.elastic.link import (
    Failed,
    Ping,
    Pulse,
    Ready,
    Start,
    encoded,
    from_rank,
    to_rank,
)

START = Start(
    group=1,
    rank=0,
    size=2,
    local_rank=0,
    local_size=1,
    cross_rank=0,
    cross_size=2,
    address="10.0.0.1",
    port=4000,
    sync=True,
    fresh=False,
)


def test_a_message_is_one_line_and_comes_back_as_it_was() -> None:
    for order in (START, Ping(sent_s=1.5)):
        assert encoded(order).count(b"\n") == 1
        assert to_rank(encoded(order)) == order
    failed = Failed(error="ValueError", message="a\nb", traceback="x\ny", infrastructure=False)
    for message in (Ready(commit=3), Pulse(group=1, commit=2, busy_s=0.1), failed):
        assert encoded(message).count(b"\n") == 1
        assert from_rank(encoded(message)) == message


@pytest.mark.parametrize(
    "line", [b"", b"hello", b'{"kind":"ready"', b'{"kind":"ready","commit":-1}', b'{"kind":"x"}']
)
def test_what_a_library_prints_is_no_message(line: bytes) -> None:
    assert from_rank(line) is None


def test_an_order_that_is_none_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        to_rank(b'{"kind":"format-the-disk"}')
