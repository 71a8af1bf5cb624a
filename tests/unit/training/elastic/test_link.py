import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from tasks.training.elastic.link import GroupSockets, Ready, encoded, from_rank, to_rank


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as here:
            there, _ = server.accept()
            with there:
                here.settimeout(5)
                there.settimeout(5)
                yield here, there


def works(pair: tuple[socket.socket, socket.socket]) -> bool:
    here, there = pair
    try:
        here.sendall(b"x")
        return there.recv(1) == b"x"
    except OSError:
        return False


def test_only_what_was_connected_while_joining_is_broken_up() -> None:
    sockets = GroupSockets()
    with ExitStack() as stack:
        earlier = stack.enter_context(connection())
        with sockets.joining(4):
            of_group = stack.enter_context(connection())
        later = stack.enter_context(connection())
        sockets.break_up(3)
        assert works(of_group)
        sockets.break_up(4)
        assert not works(of_group)
        assert works(earlier)
        assert works(later)


def test_a_group_that_breaks_while_it_is_joined_is_broken_up_when_it_is() -> None:
    sockets = GroupSockets()
    sockets.break_up(2)
    with ExitStack() as stack:
        with sockets.joining(2):
            of_group = stack.enter_context(connection())
            assert works(of_group)
        assert not works(of_group)


@pytest.mark.parametrize(
    "line", [b"", b"hello", b'{"kind":"ready"', b'{"kind":"ready","commit":-1}', b'{"kind":"x"}']
)
def test_what_a_library_prints_is_no_message(line: bytes) -> None:
    assert from_rank(line) is None


def test_a_message_is_one_line_and_an_unknown_order_is_rejected() -> None:
    message = Ready(commit=3, failed="a\nb")
    assert encoded(message).count(b"\n") == 1
    assert from_rank(encoded(message)) == message
    with pytest.raises(msgspec.ValidationError):
        to_rank(b'{"kind":"format-the-disk"}')
