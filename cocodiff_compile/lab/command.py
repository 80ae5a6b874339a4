# SPDX-License-Identifier: Apache-2.0
"""Implements `cocodiff lab`: creates, uses and removes an emulated cluster by hand."""

from __future__ import annotations

import argparse
import sys

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

DEFAULT_NAME = "lab"


def add_lab(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    lab = commands.add_parser(
        "lab", help="run an emulated cluster on this machine: nodes are network namespaces (root)"
    )
    lab.set_defaults(run=_run_action)
    actions = lab.add_subparsers(required=True, metavar="ACTION")
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default=DEFAULT_NAME, help=f"default: {DEFAULT_NAME}")
    up = actions.add_parser(
        "up", parents=[named], help="create the nodes and the slow links between them"
    )
    up.set_defaults(action=_up)
    up.add_argument("--nodes", type=int, default=2, help="default: 2")
    up.add_argument(
        "--rate", type=float, metavar="MBIT", help="Mbit/s per node and direction (unlimited)"
    )
    up.add_argument(
        "--packet-bytes", type=int, default=0, metavar="N", help="charge N more bytes per packet"
    )
    run = actions.add_parser(
        "run", parents=[named], help="run a script with torchrun on every node"
    )
    run.set_defaults(action=_run)
    run.add_argument("--tiles", type=int, default=1, help="ranks per node (default: 1)")
    run.add_argument(
        "--timeout", type=float, default=3600.0, metavar="SECONDS", help="(default: 3600)"
    )
    run.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="-- SCRIPT ...",
        help="as torchrun takes it: script.py ARGS, or -m module ARGS",
    )
    down = actions.add_parser(
        "down", parents=[named], help="end all processes on the nodes and remove the nodes"
    )
    down.set_defaults(action=_down)
    listing = actions.add_parser("list", help="list the clusters that are up")
    listing.set_defaults(action=_list)


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
