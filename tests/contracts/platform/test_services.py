"""The servers that other tests stand on: they answer, and nothing of them stays behind."""

from __future__ import annotations

from pathlib import Path

import boto3
import psutil
import psycopg
import pytest

from tests.support.services.servers import postgres_server, redis_server, s3_server


def test_redis_answers_and_is_gone_after_an_error(tmp_path: Path) -> None:
    pids = []

    def work_that_fails() -> None:
        with redis_server(tmp_path) as server, server.connect() as client:
            assert client.set("key", "value")
            pids.append(server.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work_that_fails()
    assert not psutil.pid_exists(pids[0])


def test_postgres_answers_queries(tmp_path: Path) -> None:
    with postgres_server(tmp_path) as uri, psycopg.connect(uri) as connection:
        assert connection.execute("SELECT 40 + 2").fetchone() == (42,)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(uri)


def test_s3_keeps_an_object() -> None:
    with s3_server() as endpoint:
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
        )
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="key", Body=b"value")
        assert client.get_object(Bucket="bucket", Key="key")["Body"].read() == b"value"
        client.close()
