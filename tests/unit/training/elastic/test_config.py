from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks.training.elastic.config import ElasticConfig

REMOTE = {
    "discovery": "ssh",
    "place": "/shared/hosts",
    "interface": "eth0",
    "ssh_key_file": "/keys/id",
    "ssh_known_hosts_file": "/keys/known_hosts",
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"place": ""}, "needs place"),
        ({"interface": "lo"}, "needs an interface that other"),
        ({"ssh_key_file": None}, "needs ssh_key_file"),
        ({"ssh_known_hosts_file": None}, "needs ssh_known_hosts_file"),
        ({"min_ranks": 5, "max_ranks": 4}, "min_ranks=5 is above max_ranks=4"),
        ({"interface": "eth0; rm"}, "interface"),
        ({"ssh_user": "-oProxyCommand=x y"}, "ssh_user"),
        ({"min_hosts": 1}, "min_hosts"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_a_sentence(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        ElasticConfig.model_validate({**REMOTE, **changes})
