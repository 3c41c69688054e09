"""What the board costs at which the nodes of a large run post once a second.

    python -m benchmarks.node_board

The holder's monitor is this process, with all that it does in each look; the other nodes are
connections of a second process, each of which posts the state of its eight ranks every second.
*core* is the share of a core that the holder takes, *answer* the time until a post is answered.
"""

import json
import multiprocessing
import selectors
import socket
import statistics
import time
from typing import Any

from benchmarks.harness import parser, report
from lightning_megatron.fault_tolerance.hangs.diagnosis import RankView, suspect
from lightning_megatron.fault_tolerance.hangs.heartbeat import Beat, Member
from lightning_megatron.fault_tolerance.hangs.json_lines import PERIOD_S
from lightning_megatron.fault_tolerance.hangs.node_board import BoardHolder, Node, pack
from lightning_megatron.fault_tolerance.hangs.stack_dump import ProcessState
from lightning_megatron.launch import interfaces

RANKS, LOOK_S, WATCHED_S, TOKEN = 8, 0.5, 10.0, "word"


def views(node: int) -> list[RankView]:
    """Eight ranks that wait in their backward."""
    beat = Beat(3, 3, 0.0, "backward", 1, 0.0, False, {})
    state = ProcessState("S", started=1)
    return [
        RankView(Member(node * RANKS + i, 100 + i, 1, "host", 1), beat, state, 9.0, 60.0, 0.1)
        for i in range(RANKS)
    ]


def post(address: tuple[str, int], nodes: int, seconds: float, answers: Any) -> None:
    """Be all nodes but the first, for so long; give the times until their posts were answered."""
    selector, sent, taken = selectors.DefaultSelector(), {}, []
    lines = {}
    begun = time.monotonic()
    for node in range(1, nodes):
        connection = socket.create_connection(address)
        connection.sendall(json.dumps({"node": node, "token": TOKEN}).encode() + b"\n")
        lines[node] = json.dumps({"rows": [pack(v) for v in views(node)]}).encode() + b"\n"
        selector.register(connection, selectors.EVENT_READ, node)
    connections = {key.data: key.fileobj for key in selector.get_map().values()}
    due = {node: time.monotonic() + PERIOD_S * node / nodes for node in connections}
    while (now := time.monotonic()) - begun < seconds:
        for node, at in due.items():
            if now >= at:
                connections[node].sendall(lines[node])  # type: ignore[union-attr]
                sent[node], due[node] = now, at + PERIOD_S
        for key, _ in selector.select(0.001):
            if key.fileobj.recv(1 << 16).endswith(b"\n"):  # type: ignore[union-attr]
                taken.append(time.monotonic() - sent[key.data])
    answers.put(taken)


def measure(nodes: int) -> dict[str, Any]:
    """One row."""
    listening = interfaces.listen("127.0.0.1")
    run = [Node(f"node{i}", tuple(range(i * RANKS, (i + 1) * RANKS))) for i in range(nodes)]
    address = listening.getsockname()
    board = BoardHolder(listening, TOKEN, run, lambda: None, views(0))
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    others = context.Process(target=post, args=(address, nodes, WATCHED_S + 20, answers))
    others.start()
    while len(board.posts.ages()) < nodes:
        board.post(views(0), 0.0)
        time.sleep(LOOK_S)
    used, begun = time.process_time(), time.monotonic()
    while time.monotonic() - begun < WATCHED_S:
        time.sleep(LOOK_S)
        board.post(views(0), LOOK_S)
        everybody = board.posts.everybody()
        assert everybody is not None
        assert suspect(everybody, 2.0) is None
        assert board.lost(10.0) is None
    core = (time.process_time() - used) / (time.monotonic() - begun)
    taken = answers.get(timeout=60)
    others.join()
    board.leave()
    return {
        "nodes": nodes,
        "ranks": nodes * RANKS,
        "core": f"{core:.3f}",
        "answer, median ms": f"{1e3 * statistics.median(taken):.1f}",
        "answer, 99 %": f"{1e3 * statistics.quantiles(taken, n=100)[98]:.1f}",
    }


def main() -> None:
    options = parser(__doc__, steps=0).parse_args()
    rows = [measure(nodes) for nodes in (2, 64, 512)]
    report("node_board", "What the board costs its holder", rows, options.output)


if __name__ == "__main__":
    main()
