from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks.training.checkpoints.config import CheckpointConfig


@pytest.mark.parametrize(
    ("uri", "folder", "bucket"),
    [
        ("", "", ""),
        ("file:///data/checkpoints", "/data/checkpoints", ""),
        ("s3://bucket/a/b", "", "bucket/a/b"),
        ("s3://bucket/a/", "", "bucket/a"),
        ("s3://bucket", "", "bucket"),
    ],
)
def test_a_uri_names_a_folder_or_a_bucket(uri: str, folder: str, bucket: str) -> None:
    config = CheckpointConfig(uri=uri)
    assert (config.local_folder, config.bucket_and_prefix) == (folder, bucket)


@pytest.mark.parametrize(
    "uri",
    [
        "/data/checkpoints",
        "file://host/data",
        "file:///",
        "file:///data/../etc",
        "http://host/x",
        "gs://bucket/x",
        "s3:///x",
        "s3://Bucket_/x",
        "s3://bucket/../other",
        "s3://bucket/x?endpoint=evil",
        "s3://bucket/x#y",
        "s3://key:hunter2@bucket/x",
    ],
)
def test_another_uri_is_refused_without_showing_a_password(uri: str) -> None:
    with pytest.raises(ValidationError, match="is no place for checkpoints") as caught:
        CheckpointConfig(uri=uri)
    assert "hunter2" not in caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("every_s", 0),
        ("unknown", 1),
    ],
)
def test_a_value_out_of_bounds_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        CheckpointConfig.model_validate({field: value})
