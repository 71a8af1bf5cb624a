"""A real Triton on this machine's processor, from its Python distribution, and questions to it."""

import contextlib
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.orchestration.embedded import free_port
from tasks.kernel.process import guarded_process, wait_until_ready
from tasks.kernel.settings import tool_python

PYTHON = tool_python("triton")
needs_triton = pytest.mark.skipif(
    PYTHON is None, reason="Triton has an environment of its own: `make test-triton`"
)
READY_S = 60
STOP_S = 40
CLIENT = Path(__file__).with_name("triton_client.py")


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    port: int
    log: Path

    def ask(self, *questions: dict[str, Any]) -> list[dict[str, Any]]:
        """Answers of Triton's own HTTP client, all questions at the same time."""
        done = subprocess.run(
            [str(PYTHON), str(CLIENT), f"127.0.0.1:{self.port}"],
            input=json.dumps(questions),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        answers: list[dict[str, Any]] = json.loads(done.stdout)
        return answers

    def get(self, path: str) -> Any:
        """What an address of the server says."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v2/{path}", timeout=30) as got:
            content = got.read()
        return json.loads(content) if content else None

    def is_ready(self) -> bool:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            self.get("health/ready")
            return True
        return False


@contextlib.contextmanager
def serving(repository: Path, scratch: Path) -> Iterator[Server]:
    """Serve a model repository as it lies there; nothing is filled in that it leaves out."""
    site = Path(_of_python("import sysconfig; print(sysconfig.get_path('purelib'))"))
    home = site / "pytriton" / "tritonserver"
    backends = scratch / "backends"
    shutil.copytree(home / "backends", backends)
    stub = home / "python_backend_stubs" / "3.11" / "triton_python_backend_stub"
    shutil.copy(stub, backends / "python")
    port, log = free_port(), scratch / "triton.log"
    command = [
        str(home / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        "--disable-auto-complete-config",
        "--http-address=127.0.0.1",
        f"--http-port={port}",
        "--allow-grpc=false",
        "--allow-metrics=false",
        "--exit-timeout-secs=20",
    ]
    libraries = _of_python("import sysconfig; print(sysconfig.get_config_var('LIBDIR'))")
    environment = {
        # The Python inside Triton is isolated: it takes no PYTHONPATH, and its packages are those
        # of the first `python3` on the path.
        "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
        # The stub beside the copied backend no longer finds the wheel's libraries by itself.
        "LD_LIBRARY_PATH": f"{libraries}:{site / 'nvidia_pytriton.libs'}",
    }
    with guarded_process(command, log, environment, folder=scratch, grace_s=STOP_S) as process:
        server = Server(port, log)
        wait_until_ready(process, server.is_ready, "Triton", log, READY_S)
        yield server


def _of_python(program: str) -> str:
    done = subprocess.run(
        [str(PYTHON), "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()
