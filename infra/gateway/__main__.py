"""The edge: `python -m infra.gateway prepare|run|status|shares|check|settings`.

    prepare   write what Envoy reads, and certificates; a running Envoy takes what has changed
    run       prepare, then run Envoy in the foreground; SIGTERM ends it in order
    status    what runs, the shares, and what Envoy refused
    shares    show, or set: shares flight-delay --candidate 0.1 --mirror 0.5
    check     look at the configuration, and change nothing that runs
    settings  all settings of edge/edge.yaml with their defaults and what they mean

Exit codes: 0 done, or all well; 1 something is wrong at the moment; 2 wrong input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.gateway.admin import Admin
from infra.gateway.config import EdgeConfig, EdgePlan, read_plan
from infra.gateway.envoy_process import check_bootstrap
from infra.gateway.listeners import public_pair
from infra.gateway.prepare import PUBLIC, prepare
from infra.gateway.running import run_envoy
from infra.gateway.shares import Shares, read_shares
from infra.gateway.traffic import EdgeTraffic
from serving.described import lines_of, settings_of
from serving.security.certificates import expires_at
from tasks.kernel.errors import ConfigurationError, FalajError
from tasks.kernel.settings import Settings

EXIT_FAILED, EXIT_WRONG_INPUT = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "settings":
        heading = "edge/edge.yaml, in the state folder"
        print("\n".join(lines_of(heading, settings_of(EdgeConfig, {}))))
        return 0
    home = (options.home or Settings.from_environment().home).expanduser().resolve()
    try:
        return _COMMANDS[options.command](read_plan(home), options)
    except ConfigurationError as exc:
        sys.stderr.write(f"refused: {exc}\n")
        return EXIT_WRONG_INPUT
    except FalajError as exc:
        sys.stderr.write(f"failed: {exc}\n")
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m infra.gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--home", type=Path, help="state folder (default: .falaj, or FALAJ_HOME)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name in ("prepare", "run", "check", "settings"):
        commands.add_parser(name)
    commands.add_parser("status").add_argument("--json", action="store_true")
    shares = commands.add_parser("shares")
    shares.add_argument("model", nargs="?", help="of edge.yaml; all without it")
    shares.add_argument("--candidate", type=float, help="part the candidate answers, 0 to 1")
    shares.add_argument("--mirror", type=float, help="part sent to shadow too, 0 to 1")
    shares.add_argument("--random", action="store_true", help="draw each request anew")
    return parser


def _prepare(plan: EdgePlan, _: argparse.Namespace) -> int:
    prepare(plan)
    pair = public_pair(plan)
    print(f"prepared in {plan.place.folder}")
    print(f"clients see    {pair.certificate} until {expires_at(pair.certificate):%Y-%m-%d}")
    if plan.config.certificate is None:
        print(f"clients trust  {plan.place.certificates / f'{PUBLIC}.pem'}")
    print(f"server's part  {plan.place.server_security_file}")
    if not plan.place.security_file.exists():
        print(f"nobody may ask yet: {plan.place.security_file} has to name issuers or api_keys")
    return 0


def _run(plan: EdgePlan, _: argparse.Namespace) -> int:
    prepare(plan)
    return run_envoy(plan)


def _check(plan: EdgePlan, _: argparse.Namespace) -> int:
    prepare(plan)
    if said := check_bootstrap(plan):
        sys.stderr.write(f"Envoy refuses the configuration: {said}\n")
        return EXIT_FAILED
    print("Envoy takes its first file; `status` says whether a running one took the others")
    return 0


def _status(plan: EdgePlan, options: argparse.Namespace) -> int:
    admin = Admin(plan.place.folder)
    ready = admin.is_ready()
    refused = admin.refusals() if ready else []
    shares = read_shares(plan.place.shares_file)
    if options.json:
        found = {name: shares.get(name, Shares()).model_dump() for name in plan.config.models}
        print(json.dumps({"ready": ready, "refused": refused, "shares": found}))
    else:
        print(f"edge           {'up' if ready else 'down'}, {plan.config.listen}")
        for said in refused:
            print(f"refused        {said}")
        for name in plan.config.models:
            print(_line(name, shares.get(name, Shares())))
    return 0 if ready and not refused else EXIT_FAILED


def _shares(plan: EdgePlan, options: argparse.Namespace) -> int:
    traffic = EdgeTraffic(plan.place.home)
    names = [options.model] if options.model else sorted(plan.config.models)
    if options.model and (options.candidate is not None or options.mirror is not None):
        now = traffic.shares(options.model)
        candidate = now.candidate if options.candidate is None else options.candidate
        mirror = now.mirror if options.mirror is None else options.mirror
        traffic.set_shares(options.model, candidate, mirror, sticky=not options.random)
    for name in names:
        print(_line(name, traffic.shares(name)))
    return 0


def _line(name: str, shares: Shares) -> str:
    how = "sticky" if shares.sticky else "drawn anew for each request"
    return f"{name:<20} candidate {shares.candidate:.2%}, mirror {shares.mirror:.2%}, {how}"


_COMMANDS: dict[str, Callable[[EdgePlan, argparse.Namespace], int]] = {
    "prepare": _prepare,
    "run": _run,
    "check": _check,
    "status": _status,
    "shares": _shares,
}

if __name__ == "__main__":
    sys.exit(main())
