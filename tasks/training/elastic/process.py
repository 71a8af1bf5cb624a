"""One rank's process, on this machine or on another, as the driver holds it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from tasks.kernel.settings import PROJECT_ROOT
from tasks.training.elastic.config import ElasticConfig
from tasks.training.elastic.discovery import LOCAL_HOST
from tasks.training.elastic.messages import MAX_LINE_BYTES, FromRank, Stop, ToRank, encoded
from tasks.training.launch import guard

READ_BYTES = 65536
NUM_LAST_LINES = 5
# What a rank has of its host's environment; everything else there may be a secret.
INHERITED_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES",
    "FALAJ_LEASE",
)  # fmt: skip
GRACE_S = 5.0
SSH_EXIT_CODE = 255
MAX_WAITING_BYTES = 1 << 20


@dataclass(frozen=True)
class ElasticSpec:
    """What every rank is started with.

    Args:
        module: run as `python -m module run_path`; it calls `rank.run_elastic`.
        run_path: the run directory; the same path on all hosts.
        variables: environment of the ranks, such as the number of threads; no secrets.
        lock_descriptor: of the lock on the run directory; local guards hold it too.
    """

    module: str
    run_path: Path
    variables: Mapping[str, str]
    lock_descriptor: int | None = None

    def environment(self, host: str, root: str, config: ElasticConfig) -> dict[str, str]:
        """What a rank has beside its host's own few variables."""
        return {
            **self.variables,
            "PYTHONPATH": root,
            "PYTHONUNBUFFERED": "1",
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": config.interface,
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(config.gloo_timeout_s),
            "NCCL_SOCKET_IFNAME": config.interface,
        }


class Lines:
    """Splits what a pipe delivers into lines."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe
        self.is_open = True
        self._partial = b""
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> list[bytes]:
        """Whole lines that have come; the last one without its end when the pipe closes."""
        chunk = self.pipe.read(READ_BYTES)
        if chunk is None:
            return []
        if chunk == b"":
            self.is_open = False
            return [self._partial] if self._partial else []
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            whole, self._partial = [*whole, self._partial], b""
        return whole


class RankProcess:
    """A guarded rank: here directly, on another host behind an SSH session.

    To be started in a thread that stays, see `launch.guard`.
    """

    def __init__(self, host: str, spec: ElasticSpec, config: ElasticConfig) -> None:
        self.is_remote = host != LOCAL_HOST
        self._waiting = b""
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        command, environment = _local(spec, config)
        if self.is_remote:
            command, environment, self._waiting = _remote(host, spec, config)
        grace_s = max(GRACE_S, config.notice_s)
        guarded = [sys.executable, "-S", guard.__file__, str(os.getpid()), str(grace_s), "--"]
        self._guard = subprocess.Popen(
            [*guarded, *command],
            cwd=spec.run_path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=() if spec.lock_descriptor is None else (spec.lock_descriptor,),
        )
        self._input = cast(IO[bytes], self._guard.stdin)
        os.set_blocking(self._input.fileno(), False)
        self.messages = Lines(cast(IO[bytes], self._guard.stdout))
        self.prints = Lines(cast(IO[bytes], self._guard.stderr))
        self._write()

    @property
    def pid(self) -> int:
        """Of the guard; the rank, or its SSH session, is below it."""
        return self._guard.pid

    @property
    def exit_code(self) -> int | None:
        """128 plus n where signal n ended it; None while it runs."""
        code = self._guard.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, message: ToRank | FromRank) -> None:
        """Tell the rank something; what a stuck rank does not take is dropped in the end."""
        if len(self._waiting) < MAX_WAITING_BYTES:
            self._waiting += encoded(message)
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._input.fileno(), self._waiting) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._waiting = b""

    def begin_to_end(self) -> None:
        """End the rank at once, wherever it is; returns before it is gone."""
        if self._input.closed:
            return
        self.send(Stop())
        self._input.close()  # ends a remote rank even where its link is slow
        self._guard.terminate()

    def end(self) -> None:
        """End the rank and wait until all processes of it here are gone."""
        self.begin_to_end()
        try:
            self._guard.wait(GRACE_S)
        except subprocess.TimeoutExpired:  # its rank dies with it: see guard.py
            self._guard.kill()
            self._guard.wait()
        self.messages.pipe.close()
        self.prints.pipe.close()


def _rank_command(python: str, spec: ElasticSpec) -> list[str]:
    # -P: the current folder is no place to import from.
    return [python, "-P", "-m", spec.module, str(spec.run_path)]


def _local(spec: ElasticSpec, config: ElasticConfig) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a rank on this machine."""
    allowed = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    environment = allowed | spec.environment(LOCAL_HOST, str(PROJECT_ROOT), config)
    return _rank_command(sys.executable, spec), environment


def _remote(
    host: str, spec: ElasticSpec, config: ElasticConfig
) -> tuple[list[str], dict[str, str], bytes]:
    """SSH command and its environment, and the first line of its stdin: see `agent`."""
    python = config.remote_python or sys.executable
    root = config.remote_root or str(PROJECT_ROOT)
    order = {
        "command": _rank_command(python, spec),
        "directory": str(spec.run_path),
        "environment": spec.environment(host, root, config),
        "inherit": INHERITED_VARIABLES,
        "silence_limit_s": config.silence_limit_s,
        "grace_s": max(GRACE_S, config.notice_s),
    }
    agent = f"{root}/tasks/training/elastic/agent.py"
    command = ssh_command(host, [python, "-S", agent], config)
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return command, environment, json.dumps(order).encode() + b"\n"


def ssh_command(host: str, remote: list[str], config: ElasticConfig) -> list[str]:
    """`remote` on `host`, through the system's SSH client, whatever the user's own settings say."""
    options = {
        "BatchMode": "yes",  # never asks
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": str(config.ssh_known_hosts_file),
        "GlobalKnownHostsFile": "/dev/null",
        "IdentityFile": str(config.ssh_key_file),
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "ForwardAgent": "no",
        "ClearAllForwardings": "yes",
        "ControlMaster": "no",
        "Port": str(config.ssh_port),
        # A link that is cut ends the session within six seconds.
        "ServerAliveInterval": "2",
        "ServerAliveCountMax": "3",
        "ConnectTimeout": "5",
        "LogLevel": "ERROR",
    }
    user = ["-l", config.ssh_user] if config.ssh_user else []
    settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    quoted = [shlex.quote(word) for word in remote]
    return ["ssh", "-F", "none", "-T", *user, *settings, "--", host, "exec", *quoted]
