"""Files elsewhere: objects of S3, and what a web server gives."""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pyarrow.dataset as ds
from pyarrow import fs

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import SourceFile
from tasks.features.tables import copies
from tasks.features.tables.files import NUM_THREADS, files_of
from tasks.features.tables.formats import unpacked
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.values import is_loopback

CONNECT_S, ANSWER_S = 10.0, 60.0
NUM_ATTEMPTS = 3
LARGEST_DOWNLOAD_BYTES = 20_000_000_000
PASSING = re.compile(
    "FileNotFound|NETWORK_CONNECTION|SLOW_DOWN|THROTTLING|TIMEOUT|UNAVAILABLE|INTERNAL"
)
"""What S3 says about a fault that goes by."""


def s3_endpoint() -> str | None:
    """Address of another S3 than Amazon's, from the environment; None for Amazon's.

    Raises:
        ConfigurationError: rows would travel over a network unencrypted.
    """
    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if address:
        _check_encrypted(address)
    return address or None


def _check_encrypted(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ConfigurationError(
            f"rows would come from {parts.scheme}://{parts.hostname}, where anybody on the way "
            "could read or change them; expected https://. Only loopback may go without"
        )


def s3_source(table: RawTable, window: TimeWindow, scratch: Path) -> copies.Source:
    """Objects of a bucket: one, those below a prefix, or those that fit a pattern.

    Keys and region are those that the AWS tools take, from the environment, `~/.aws` or the
    machine's role.
    """
    path = table.uri.removeprefix("s3://")
    bucket = path.partition("/")[0]
    advice = (
        "see that AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY belong to somebody who may list and "
        "read the bucket, that AWS_REGION is its region, and AWS_ENDPOINT_URL its address"
    )

    explained = partial(copies.source_explained, table, "S3", OSError, PASSING, advice)
    with explained():
        endpoint = s3_endpoint()
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        system = fs.S3FileSystem(
            endpoint_override=endpoint,
            region=region or ("us-east-1" if endpoint else fs.resolve_s3_region(bucket)),
            connect_timeout=CONNECT_S,
            request_timeout=ANSWER_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=NUM_ATTEMPTS),
        )
        if system.get_file_info(bucket).type == fs.FileType.NotFound:
            raise ConfigurationError(
                f"there is no bucket {bucket!r}; correct {table.uri!r} or AWS_ENDPOINT_URL"
            )
        found = files_of(table, system, path, window)

    def state(info: fs.FileInfo) -> tuple[str, str]:
        with system.open_input_file(info.path) as stream:
            return info.path, stream.metadata()["ETag"].decode()

    def copy(info: fs.FileInfo) -> Path:
        target = scratch / info.path
        if info.extension.lower() in ("parquet", "pq"):
            rows = ds.dataset(info.path, filesystem=system, format="parquet")
            return copies.copy_window(rows, table, window, target, Path(info.path))
        target.parent.mkdir(parents=True, exist_ok=True)
        with system.open_input_stream(info.path) as stream, target.open("wb") as copy:
            shutil.copyfileobj(stream, copy, 1 << 20)
        return unpacked(target, target.parent / f"{target.name}-unpacked")

    def digest() -> str:
        with explained(), ThreadPoolExecutor(NUM_THREADS) as pool:
            return copies.digest_of_states(list(pool.map(state, found)))

    def bring() -> list[Path]:
        with explained(), ThreadPoolExecutor(NUM_THREADS) as pool:
            return list(pool.map(copy, found))

    num_bytes = sum(info.size for info in found)
    seen = SourceFile(uri=table.uri, sha256=digest(), num_bytes=num_bytes)
    return copies.Source(seen, bring, digest)


def http_source(table: RawTable, scratch: Path) -> copies.Source:
    """A file that a web server gives, copied whole.

    Raises:
        ConfigurationError: it is refused or absent, too large, or would come unencrypted.
        TransientError: the server does not answer, or not to the end.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    target = scratch / (Path(urlsplit(table.uri).path).name or "data.csv")
    client = httpx.Client(
        timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        follow_redirects=True,
        headers={"Accept-Encoding": "identity"},
        event_hooks={"request": [lambda request: _check_encrypted(str(request.url))]},
    )
    try:
        with client, client.stream("GET", table.uri) as reply, target.open("wb") as copy:
            _check_status(reply)
            for chunk in reply.iter_raw():
                copy.write(chunk)
                if reply.num_bytes_downloaded > LARGEST_DOWNLOAD_BYTES:
                    raise ConfigurationError(
                        f"{table.uri} gives more than {LARGEST_DOWNLOAD_BYTES / 1e9:.0f} GB; bring "
                        "it as Parquet in a folder or a bucket, of which a window reads its files"
                    )
    except httpx.HTTPError as exc:
        raise TransientError(
            f"{table.uri} did not answer to the end ({type(exc).__name__}: {exc}); see that the "
            "network and the address are right, then run again"
        ) from exc
    return copies.copied(table, target)


def _check_status(reply: httpx.Response) -> None:
    if reply.is_success:
        return
    answer = f"{reply.url} answers {reply.status_code} {reply.reason_phrase}, expected 200"
    if reply.status_code == 429 or reply.is_server_error:
        raise TransientError(f"{answer}; run again later")
    raise ConfigurationError(
        f"{answer}; correct the uri, or bring the file here if it needs a log-in"
    )
