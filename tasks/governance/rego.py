"""Policies in Rego, asked in a process of their own, which ends where an answer takes too long.

Rego has no endless loop, but a nested one or `numbers.range` takes any time and memory, and nothing
in the same process can stop the library. The process imports this file alone.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from threading import Lock, Timer
from typing import Any
from weakref import finalize

ANSWERS_WITHIN_S = 10.0


class Rego:
    """What some packages answer.

    Args:
        modules: name and text of each policy.
        packages: those below `falaj` that are asked.
        data: what policies read as `data`, as JSON.

    Raises:
        TimeoutError: as `ask`.
        ValueError: the library is away, or a policy cannot be read.
    """

    def __init__(
        self, modules: Sequence[tuple[str, str]], packages: Sequence[str], data: str
    ) -> None:
        wanted = ", ".join(f"data.falaj.{package}.answer" for package in packages)
        self._lock = Lock()  # of an answer, which must not be taken for another's
        self._process = subprocess.Popen(
            (sys.executable, "-P", __file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        finalize(self, _end, self._process)
        self.ask({"modules": modules, "data": data, "query": f"found = [{wanted}]"})

    def ask(self, question: object) -> Any:
        """The answers of the packages, in their order.

        Raises:
            TimeoutError: none came in time, or the process crashed; it has ended.
            ValueError: a policy failed.
        """
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None
        assert reader is not None
        with self._lock:
            limit = Timer(ANSWERS_WITHIN_S, self._process.kill)
            limit.start()
            try:
                writer.write(f"{json.dumps(question)}\n")
                writer.flush()
                line = reader.readline()
            except BrokenPipeError:
                line = ""
            finally:
                limit.cancel()
        if not line:
            raise TimeoutError(f"no answer within {ANSWERS_WITHIN_S:g} s")
        if "error" in (found := json.loads(line)):
            raise ValueError(found["error"])
        return found["answer"]


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def _serve() -> None:
    """Take policies, then questions, a line each; write a line for each."""
    rego: Any = None
    for line in sys.stdin:
        said = json.loads(line)
        found: dict[str, Any] = {"answer": None}
        try:
            if rego is None:
                from regopy import Interpreter

                rego = Interpreter()
                rego.strict_built_in_errors = True
                rego.add_data_json(said["data"])
                for name, text in said["modules"]:
                    rego.add_module(name, text)
                bundle = rego.build(said["query"])
            else:
                rego.set_input(said)
                answer = json.loads(str(rego.query_bundle(bundle)))
                found["answer"] = answer["bindings"]["found"]
        except Exception as exc:  # the library is away, or raises any of a dozen kinds
            found = {"error": f"{type(exc).__name__}: {exc}"}
        sys.stdout.write(f"{json.dumps(found)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
