"""Policies in Rego, asked in a process of their own, which ends where an answer takes too long.

Rego has no endless loop, but a nested one or `numbers.range` takes any time and memory, and nothing
in the same process can stop the library. The process imports this file alone.
"""

import json
import sys
from collections.abc import Sequence
from subprocess import PIPE, Popen
from threading import Lock, Timer
from typing import Any
from weakref import finalize

ANSWERS_WITHIN_S, STARTS_WITHIN_S = 10.0, 60.0


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
        command = (sys.executable, "-P", __file__)
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True)
        finalize(self, _end, self._process)
        self.ask((modules, data, f"found = [{wanted}]"), STARTS_WITHIN_S)

    def ask(self, question: object, within_s: float | None = None) -> Any:
        """The answers of the packages, in their order.

        Args:
            question: what policies read as `input`.
            within_s: None: as long as a question may take.

        Raises:
            TimeoutError: none came in time, or the process crashed; it has ended.
            ValueError: a policy failed.
        """
        process, within_s = self._process, within_s or ANSWERS_WITHIN_S
        limit = Timer(within_s, process.kill)
        with self._lock:
            limit.start()
            try:
                process.stdin.write(f"{json.dumps(question)}\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                line = process.stdout.readline()  # type: ignore[union-attr]
            except BrokenPipeError:
                line = ""
            finally:
                limit.cancel()
        if not line:
            raise TimeoutError(f"no answer within {within_s:g} s")
        answer, error = json.loads(line)
        if error:
            raise ValueError(error)
        return answer


def _end(process: Popen[str]) -> None:
    process.kill()
    process.communicate()


def _serve() -> None:
    """Take policies, then questions, a line each; write a line for each."""
    rego: Any = None
    for line in sys.stdin:
        said, answer, error = json.loads(line), None, ""
        try:
            if rego is None:
                from regopy import Interpreter

                rego = Interpreter()
                rego.strict_built_in_errors = True
                modules, data, query = said
                rego.add_data_json(data)
                for name, text in modules:
                    rego.add_module(name, text)
                bundle = rego.build(query)
            else:
                rego.set_input(said)
                answer = json.loads(str(rego.query_bundle(bundle)))["bindings"]["found"]
        except Exception as exc:  # the library is away, or raises any of a dozen kinds
            error = f"{type(exc).__name__}: {exc}"
        sys.stdout.write(f"{json.dumps((answer, error))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
