# SPDX-License-Identifier: Apache-2.0
"""Emulates a cluster: network namespaces are its nodes, joined by a switch with slow ports.

    node 0                        switch                       node 1
    eth0 10.77.0.1  ==rate==  port0  [ bridge ]  port1  ==rate==  eth0 10.77.0.2

Each node has one full-duplex interface: `tc tbf` shapes eth0 (what the node sends) and the switch's
port (what it receives). Ranks of one node communicate over its loopback, unshaped. Everything lives
inside of namespaces named `cocodiff-NAME-...`; nothing is created in the host's own, and removing
the namespaces removes all of it. It requires Linux, root and iproute2.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cocodiff_compile.errors import UserError

PREFIX = "cocodiff"
INTERFACE = "eth0"
_PACKAGES = {"iproute2": ("ip", "tc"), "util-linux": ("setpriv",)}
CLUSTER_VARIABLE = "COCODIFF_CLUSTER"
"""Holds the name of the cluster in every process that runs on a node."""

MAX_NODES = 64
_NAME = r"[a-z0-9][a-z0-9_.]{0,30}"
_SUBNET = "10.77.0"
_BURST_BYTES, _BURST_S = 16384, 1.5e-3
"""The burst that may leave at once after a pause, in bytes or in time at the rate: small, so that
pauses save up little, but not so small that a late timer on a busy core slows the link.
"""

_PACKET_BYTES = 1514
_BUNDLE_OF_BURST, _MAX_BUNDLE_BYTES = 0.9, 60_000
"""The size of bundled segments: large, for the computing cores, but a burst must hold one."""

_QUEUE = "100ms"
"""The queue is long enough that nothing is dropped, as in the networks of clusters."""


@dataclass(frozen=True)
class NodeLink:
    """Describes a node's interface. Without a rate it is as fast as the kernel; every packet is
    charged as if it had `packet_bytes` more.
    """

    rate_mbit: float | None = None
    packet_bytes: int = 0

    def __post_init__(self) -> None:
        if self.rate_mbit is not None and not 0.1 <= self.rate_mbit <= 100_000:
            raise UserError(f"rate {self.rate_mbit} Mbit/s; allowed: 0.1 to 100000")
        if not 0 <= self.packet_bytes <= 65536 or (self.packet_bytes and self.rate_mbit is None):
            raise UserError("packet_bytes must be 0 to 65536, and requires a rate")


@dataclass(frozen=True)
class Cluster:
    name: str
    num_nodes: int

    def __post_init__(self) -> None:
        if not re.fullmatch(_NAME, self.name):
            raise UserError(f"cluster name {self.name!r}; allowed: up to 31 of a-z, 0-9, _ and .")
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise UserError(f"{self.num_nodes} nodes; allowed: 1 to {MAX_NODES}")

    @property
    def switch(self) -> str:
        return f"{PREFIX}-{self.name}-switch"

    def node(self, index: int) -> str:
        """Returns the namespace of a node."""
        return f"{PREFIX}-{self.name}-node{index}"

    def address(self, index: int) -> str:
        return f"{_SUBNET}.{index + 1}"

    def enter(self, index: int) -> list[str]:
        """Returns the beginning of a command line that runs the rest on a node."""
        return ["ip", "netns", "exec", self.node(index)]


def check_can_emulate() -> None:
    """Raises UserError with the remedy if namespaces cannot be created."""
    for package, tools in _PACKAGES.items():
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            names = " and ".join(missing)
            raise UserError(f"{names} not found: install {package} (Debian: apt install {package})")
    if os.geteuid() != 0:
        raise UserError(
            "an emulated cluster consists of network namespaces, which require root: run it with "
            "sudo -E, or measure existing ranks with torchrun --no-python cocodiff bench"
        )


def build_cluster(name: str, num_nodes: int, link: NodeLink) -> Cluster:
    """Creates and shapes a cluster. If a part fails, everything created before is removed."""
    cluster = Cluster(name, num_nodes)
    _check_can_build(name)
    try:
        _ip("netns", "add", cluster.switch)
        _ip("-n", cluster.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", cluster.switch, "link", "set", "bridge", "up")
        for index in range(num_nodes):
            _attach_node(cluster, index)
        set_link(cluster, link)
    except BaseException:
        remove_cluster(name)
        raise
    return cluster


def _check_can_build(name: str) -> None:
    check_can_emulate()
    if name in (known.name for known in list_clusters()):
        raise UserError(
            f"cluster {name!r} is already up; remove it with: cocodiff lab down --name {name}"
        )


def _attach_node(cluster: Cluster, index: int) -> None:
    node, switch, port = cluster.node(index), cluster.switch, f"port{index}"
    _ip("netns", "add", node)
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", INTERFACE, "netns", node)
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", node, "address", "add", f"{cluster.address(index)}/24", "dev", INTERFACE)
    _ip("-n", node, "link", "set", "lo", "up")
    _ip("-n", node, "link", "set", INTERFACE, "up")
    # A connection that was idle continues at its previous speed.
    _run([*cluster.enter(index), "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0"])


def set_link(cluster: Cluster, link: NodeLink) -> None:
    """Shapes every node's interface in both directions. It may be called while traffic flows."""
    for index in range(cluster.num_nodes):
        _shape(cluster.node(index), INTERFACE, link)
        _shape(cluster.switch, f"port{index}", link)


def _shape(namespace: str, device: str, link: NodeLink) -> None:
    device_of = ["tc", "-n", namespace, "qdisc"]
    if link.rate_mbit is None:
        subprocess.run([*device_of, "del", "dev", device, "root"], capture_output=True, check=False)
        return
    rate = round(link.rate_mbit * 1e6)
    burst = max(_BURST_BYTES, round(rate / 8 * _BURST_S), 2 * (_PACKET_BYTES + link.packet_bytes))
    bundle, overhead = min(_MAX_BUNDLE_BYTES, int(_BUNDLE_OF_BURST * burst)), []
    if link.packet_bytes:  # a bundle is charged once, so that segments must not be bundled
        bundle, overhead = _PACKET_BYTES, ["stab", "overhead", str(link.packet_bytes)]
    _ip("-n", namespace, "link", "set", device, "gso_max_size", str(bundle))
    _ip("-n", namespace, "route", "flush", "cache")  # so that open connections read it again
    shaper = ["tbf", "rate", f"{rate}bit", "burst", str(burst), "latency", _QUEUE]
    _run([*device_of, "replace", "dev", device, "root", *overhead, *shaper])


def list_clusters() -> list[Cluster]:
    """Returns all clusters that are up on this machine, whoever created them."""
    pattern = re.compile(rf"^{PREFIX}-({_NAME})-(node\d+|switch)\b", re.MULTILINE)
    nodes: dict[str, int] = {}
    for name, part in pattern.findall(_ip("netns", "list")):
        nodes[name] = nodes.get(name, 0) + (part != "switch")
    return [Cluster(name, max(1, count)) for name, count in sorted(nodes.items())]


def find_cluster(name: str) -> Cluster:
    """Returns a cluster that is up. Raises UserError if it is not."""
    known = {cluster.name: cluster for cluster in list_clusters()}
    if name not in known:
        raise UserError(
            f"cluster {name!r} is not up (up: {', '.join(known) or 'none'}); create it with: "
            f"cocodiff lab up --name {name}"
        )
    return known[name]


_REMOVE = f"""
spaces() {{ ip netns list | awk -v of="{PREFIX}-$1-" 'index($1, of) == 1 {{ print $1 }}'; }}
pids() {{ for space in $(spaces "$1"); do ip netns pids "$space"; done; }}
for attempt in $(seq 100); do
    found=$(pids "$1")
    [ -z "$found" ] && break
    kill -KILL $found 2>/dev/null
    sleep 0.05
done
for space in $(spaces "$1"); do ip netns delete "$space"; done
left="$(pids "$1")$(spaces "$1")"
[ -z "$left" ] || {{ echo "cluster $1 could not be removed: $left" >&2; exit 1; }}
"""
"""Kills every process in the namespaces of cluster $1 and removes them; fails if some are left."""


def remove_cluster(name: str) -> None:
    """Kills the processes of a cluster and removes it; does nothing if it is not up."""
    subprocess.run(["sh", "-c", _REMOVE, "sh", name], check=True)


@contextmanager
def emulated_cluster(name: str, num_nodes: int, link: NodeLink) -> Iterator[Cluster]:
    """Creates a cluster that is removed at the end of the block, or when this process ends.

    A shell in a session of its own holds the other end of a pipe and removes the cluster when the
    pipe closes: at the end of the block, or by the kernel if this process is killed.
    """
    Cluster(name, num_nodes)
    _check_can_build(name)
    guard = subprocess.Popen(
        ["sh", "-c", "trap '' INT TERM HUP; cat >/dev/null\n" + _REMOVE, "sh", name],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        yield build_cluster(name, num_nodes, link)
    finally:
        guard.stdin.close()
        guard.wait()


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
