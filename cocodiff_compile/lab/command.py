"""Implements `cocodiff lab`: creates, uses and removes an emulated cluster by hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.cluster import (
    NodeLink,
    build_cluster,
    check_can_emulate,
    find_cluster,
    list_clusters,
    remove_cluster,
)
from cocodiff_compile.lab.local_ranks import RankFailedError
from cocodiff_compile.lab.nodes import run_on_nodes

Commands = argparse._SubParsersAction
DEFAULT_NAME = "lab"


def add_lab(commands: Commands[argparse.ArgumentParser]) -> None:
    lab = commands.add_parser(
        "lab", help="run an emulated cluster on this machine: nodes are network namespaces (root)"
    )
    actions = lab.add_subparsers(required=True, metavar="ACTION")
    up = _add(actions, "up", "create the nodes and the slow links between them", _up)
    up.add_argument("--nodes", type=int, default=2, help="default: 2")
    up.add_argument("--rate", type=float, metavar="MBIT", help="per node and direction, Mbit/s")
    up.add_argument(
        "--packet-bytes", type=int, default=0, metavar="N", help="charge N more bytes per packet"
    )
    run = _add(actions, "run", "run a script with torchrun on every node", _run)
    run.add_argument("--tiles", type=int, default=1, help="ranks per node (default: 1)")
    run.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS")
    run.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="-- SCRIPT ...",
        help="as torchrun takes it: script.py ARGS, or -m module ARGS",
    )
    _add(actions, "down", "end all processes on the nodes and remove the nodes", _down)
    listing = actions.add_parser("list", help="list the clusters that are up")
    listing.set_defaults(run=_run_action, action=_list)


def _add(
    actions: Commands[argparse.ArgumentParser],
    name: str,
    text: str,
    action: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text)
    parser.add_argument("--name", default=DEFAULT_NAME, help=f"default: {DEFAULT_NAME}")
    parser.set_defaults(run=_run_action, action=action)
    return parser


def _run_action(parsed: argparse.Namespace) -> int:
    try:
        status: int = parsed.action(parsed)
    except RankFailedError as error:
        print(f"cocodiff lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; all nodes' processes were ended", file=sys.stderr)
        return 130
    return status


def _up(parsed: argparse.Namespace) -> int:
    link = NodeLink(parsed.rate, parsed.packet_bytes)
    cluster = build_cluster(parsed.name, parsed.nodes, link)
    rate = link.rate_mbit
    speed = "unlimited" if rate is None else f"{rate:g} Mbit/s in each direction"
    for node in range(cluster.num_nodes):
        print(f"node {node}  {cluster.address(node)}  {speed}  namespace {cluster.node(node)}")
    return 0


def _run(parsed: argparse.Namespace) -> int:
    check_can_emulate()
    script = parsed.script[1:] if parsed.script[:1] == ["--"] else parsed.script
    if not script:
        raise UserError("nothing to run: cocodiff lab run --tiles 2 -- script.py ARGS")
    if parsed.tiles < 1:
        raise UserError(f"--tiles {parsed.tiles}; allowed: 1 or more")
    run_on_nodes(
        find_cluster(parsed.name),
        parsed.tiles,
        script,
        on_line=lambda node, line: print(f"[node {node}] {line}", flush=True),
        timeout_s=parsed.timeout,
    )
    return 0


def _down(parsed: argparse.Namespace) -> int:
    check_can_emulate()
    cluster = find_cluster(parsed.name)
    remove_cluster(cluster.name)
    print(f"cluster {cluster.name!r} is down")
    return 0


def _list(_parsed: argparse.Namespace) -> int:
    check_can_emulate()
    clusters = list_clusters()
    for cluster in clusters:
        print(f"{cluster.name}  {cluster.num_nodes} nodes")
    if not clusters:
        print("no cluster is up")
    return 0
