# SPDX-License-Identifier: Apache-2.0
"""The emulated cluster: namespaces, rates, and that nothing of it is left, however it ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab import cluster as lab
from cocodiff_compile.lab.cluster import Cluster, NodeLink, build_cluster, emulated_cluster
from cocodiff_compile.lab.local_ranks import RankFailedError
from cocodiff_compile.lab.nodes import run_on_nodes
from tests.support.emulated import (
    NAME,
    eventually,
    listen_to_interrupts,
    needs_emulation,
    our_namespaces,
)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e9])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(UserError, match="Mbit/s; allowed"):
        NodeLink(rate)


@pytest.mark.parametrize("link", [{"packet_bytes": 10}, {"rate_mbit": 5.0, "packet_bytes": -1}])
def test_a_cost_per_packet_needs_a_rate_and_is_positive(link: dict[str, float]) -> None:
    with pytest.raises(UserError, match="packet_bytes must be"):
        NodeLink(**link)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "a" * 40])
def test_names_that_could_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="cluster name"):
        Cluster(name, 2)


def test_without_iproute2_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _tool: None)
    with pytest.raises(
        UserError, match=r"ip and tc not found: install iproute2 .*apt install iproute2"
    ):
        lab.check_can_emulate()


def test_without_root_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match=r"require root.*torchrun"):
        build_cluster(NAME, 2, NodeLink())


@needs_emulation
def test_nodes_reach_each_other_through_shaped_interfaces_both_ways() -> None:
    with emulated_cluster(NAME, 3, NodeLink(rate_mbit=40, packet_bytes=100)) as cluster:
        for node in range(3):
            for namespace, device in (
                (cluster.node(node), "eth0"),
                (cluster.switch, f"port{node}"),
            ):
                shown = _output("tc", "-n", namespace, "qdisc", "show", "dev", device)
                assert "tbf" in shown and "rate 40Mbit" in shown
        assert _received(cluster, sender=2, receiver=1, text="hello") == "hello"
        lab.set_link(cluster, NodeLink())
        assert "tbf" not in _output("tc", "-n", cluster.node(0), "qdisc", "show")
    assert our_namespaces() == []


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _received(cluster: Cluster, sender: int, receiver: int, text: str) -> str:
    listen = "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); "
    listen += "k, _ = s.accept(); print(k.recv(99).decode())"
    server = subprocess.Popen(
        [*cluster.enter(receiver), sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    address = (cluster.address(receiver), 5000)
    send = f"import socket; socket.create_connection({address}).sendall({text!r}.encode())"
    subprocess.run([*cluster.enter(sender), sys.executable, "-c", send], check=True)
    return server.communicate(timeout=20)[0].strip()


@needs_emulation
def test_nothing_is_left_of_a_cluster_that_could_not_be_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_arguments: object) -> None:
        raise UserError("no such rate")

    monkeypatch.setattr(lab, "set_link", fail)
    with pytest.raises(UserError, match="no such rate"):
        build_cluster(NAME, 2, NodeLink())
    assert our_namespaces() == []


@needs_emulation
def test_a_second_cluster_of_the_same_name_is_refused_and_the_first_stays() -> None:
    with emulated_cluster(NAME, 1, NodeLink()):
        with pytest.raises(UserError, match="is already up"):
            build_cluster(NAME, 1, NodeLink())
        with pytest.raises(UserError, match="is already up"), emulated_cluster(NAME, 1, NodeLink()):
            pass
        assert len(our_namespaces()) == 2


_HOLD = """
import subprocess, sys, time
from cocodiff_compile.lab.cluster import NodeLink, emulated_cluster
with emulated_cluster(sys.argv[1], 2, NodeLink(10)) as cluster:
    process = subprocess.Popen([*cluster.enter(1), "sleep", "1000"], start_new_session=True)
    print(process.pid, flush=True)
    time.sleep(1000)
"""


@needs_emulation
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_owner_leaves_neither_namespace_nor_process(how: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _HOLD, NAME],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=listen_to_interrupts,  # noqa: PLW1509
    )
    try:
        assert owner.stdout is not None
        held = int(owner.stdout.readline())
        assert len(our_namespaces()) == 3
        owner.send_signal(how)
        owner.wait(timeout=30)
        eventually(lambda: our_namespaces() == [])
        eventually(lambda: not Path(f"/proc/{held}").exists())
    finally:
        owner.kill()
        owner.wait()


_SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank())])
dist.all_reduce(value)
os.write(1, f"sum {value.item()}\\n".encode())  # at once: two ranks share the pipe
dist.destroy_process_group()
"""


@needs_emulation
@pytest.mark.gloo
def test_torchrun_on_every_node_makes_one_world(tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(_SUM)
    lines: list[tuple[int, str]] = []
    with emulated_cluster(NAME, 2, NodeLink(100)) as cluster:
        run_on_nodes(
            cluster,
            2,
            [str(script)],
            on_line=lambda node, line: lines.append((node, line)),
            timeout_s=120,
        )
    assert sorted(item for item in lines if item[1] == "sum 6.0") == [
        (0, "sum 6.0"),
        (0, "sum 6.0"),
        (1, "sum 6.0"),
        (1, "sum 6.0"),
    ]


_FAIL_ON_NODE_1 = """
import os, time
if os.environ["GROUP_RANK"] == "1":
    raise SystemExit("planted")
time.sleep(1000)
"""


@needs_emulation
def test_a_node_that_fails_ends_the_others_and_says_why(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(_FAIL_ON_NODE_1)
    with emulated_cluster(NAME, 2, NodeLink()) as cluster:
        with pytest.raises(RankFailedError, match=r"node 1 ended(.|\n)*planted"):
            run_on_nodes(
                cluster, 1, [str(script)], on_line=lambda _node, _line: None, timeout_s=120
            )
        pids = _output("ip", "netns", "pids", cluster.node(0))
        assert pids == ""


@needs_emulation
def test_nodes_that_take_too_long_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(1000)")
    begin = time.monotonic()
    with (
        emulated_cluster(NAME, 1, NodeLink()) as cluster,
        pytest.raises(RankFailedError, match=r"nodes \[0\] did not finish"),
    ):
        run_on_nodes(cluster, 1, [str(script)], on_line=lambda _node, _line: None, timeout_s=5)
    assert time.monotonic() - begin < 300
    assert our_namespaces() == []
