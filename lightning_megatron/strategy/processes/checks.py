"""Faults of how the processes of a run were started, found before they look for each other.

On one machine there is little to get wrong: Lightning or torchrun numbers the processes and chooses
an address. On several machines the user says on each where rank 0 is (MASTER_ADDR, MASTER_PORT) and
which node it is (NODE_RANK), and tells Slurm and the Trainer how many there are. Ranks that were
told different things would wait for each other until ``init_timeout_s``.

A process that cannot take part for such a reason says so to the others, if it reaches the store
where they meet (`tell_others`). It cannot where the fault is that store's address; then the others
wait, and name who is missing.
"""

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_megatron import env
from lightning_megatron.errors import ConfigError, ConnectError
from lightning_megatron.launch import interfaces
from lightning_megatron.launch.attempt import Peer
from lightning_megatron.launch.rendezvous import report
from lightning_megatron.launch.rendezvous_store import reach_store

REACH_S = 5.0
"""Seconds in which a process that cannot take part tries to tell the others, who may come later."""


def start_problems(
    environment: ClusterEnvironment, nodes: int, processes: int, bind: str | None
) -> list[str]:
    """Return what is wrong with the numbers and names that this process was started with.

    Args:
        environment: of the launcher.
        nodes: of the run.
        processes: of this node.
        bind: the network interface that the user chose.
    """
    elastic = env.torch_elastic()
    if isinstance(environment, SLURMEnvironment):
        problems = _slurm_problems(nodes, processes)
    elif isinstance(environment, LightningEnvironment):
        problems = _node_problems(environment, nodes, processes)
    else:
        problems = []
    if problems or nodes == 1 or (elastic is not None and elastic.agent_store):
        return problems
    return _address_problems(environment, _is_first(environment, processes), bind)


def _is_first(environment: ClusterEnvironment, processes: int) -> bool:
    if isinstance(environment, LightningEnvironment):  # its ranks are set later
        return environment.node_rank() * processes + environment.local_rank() == 0
    return environment.global_rank() == 0


def _slurm_problems(nodes: int, processes: int) -> list[str]:
    sizes, problems = env.slurm_sizes(), []
    started = sizes.get("SLURM_NNODES")
    if started is not None and started != nodes:
        problems.append(
            f"SLURM_NNODES={started}, Trainer(num_nodes={nodes}): Slurm has started the processes "
            f"on {_count(started, 'node')}; nearest valid: Trainer(num_nodes={started}), or srun "
            f"--nodes={nodes}"
        )
    tasks = sizes.get("SLURM_NTASKS")
    if not problems and tasks is not None and tasks != nodes * processes:
        per_node = tasks // nodes
        nearest = f"Trainer(devices={per_node}), or " if tasks % nodes == 0 else ""
        problems.append(
            f"SLURM_NTASKS={tasks}, Trainer(num_nodes={nodes}, devices={processes}): Slurm starts "
            f"one process for each device, so {nodes * processes}; nearest valid: {nearest}srun "
            f"--ntasks-per-node={processes}"
        )
    return problems


def _node_problems(environment: LightningEnvironment, nodes: int, processes: int) -> list[str]:
    node, local = environment.node_rank(), environment.local_rank()
    host, problems = Peer.here().host, []
    if not 0 <= node < nodes:
        problems.append(
            f"NODE_RANK={node} on {host}, Trainer(num_nodes={nodes}): nodes are numbered from 0 to "
            f"{nodes - 1}; nearest valid: NODE_RANK={min(max(node, 0), nodes - 1)}, or "
            f"Trainer(num_nodes={max(node, 0) + 1})"
        )
    if not 0 <= local < processes:
        problems.append(
            f"LOCAL_RANK={local} on {host}, Trainer(devices={processes}): the processes of a node "
            f"are numbered from 0 to {processes - 1}; nearest valid: Trainer(devices={local + 1})"
        )
    missing = env.missing_meeting_place() if nodes > 1 else []
    if missing:
        example = {"MASTER_ADDR": "<name or address of the first node>", "MASTER_PORT": "29500"}
        problems.append(
            f"{' and '.join(missing)} not set on {host}, Trainer(num_nodes={nodes}): the nodes "
            "meet at an address and port of the first of them, which all have to be told; nearest "
            f"valid: {' '.join(f'{name}={example[name]}' for name in missing)} on every node"
        )
    return problems


def _address_problems(
    environment: ClusterEnvironment, is_first: bool, bind: str | None
) -> list[str]:
    address, host = environment.main_address, Peer.here().host
    if bind == interfaces.EVERY:  # then the address may be one that is forwarded to this machine
        return []
    if is_first and not interfaces.is_local(address):
        place = interfaces.leading_to(address)
        own = host if place is None else place.address
        return [
            f"MASTER_ADDR={address}: rank 0 would meet the others there, but it runs on {host}, "
            f"which has no such name or address; nearest valid: MASTER_ADDR={own} on every node, "
            f"or another NODE_RANK than 0 if {host} is not the first node"
        ]
    if bind is None and interfaces.leading_to(address, env.chosen_interface()) is None:
        return [unclear_interface(address)]
    return []


def unclear_interface(address: str) -> str:
    """Sentence on a machine of which nothing tells by which interface others reach it."""
    outside = [p for p in interfaces.places() if not interfaces.is_loopback(p.address)]
    named = ", ".join(f"{place.interface} ({place.address})" for place in outside)
    return (
        f"MASTER_ADDR={address} is {Peer.here().host} itself by an address that only this machine "
        f"reaches, and nothing tells which of its network interfaces the other nodes reach: "
        f"{named}; nearest valid: ConnectionConfig(bind={outside[0].interface!r}), or an address "
        "of it as MASTER_ADDR"
    )


def tell_others(
    environment: ClusterEnvironment, nodes: int, processes: int, problems: ConfigError
) -> None:
    """Report why this process cannot take part in a run of several machines, if that is possible.

    It takes some seconds where nobody answers. Nothing happens on a rank 0 that is to hold the
    store itself: it has `meeting.dismiss`.
    """
    elastic = env.torch_elastic()
    held = elastic is not None and elastic.agent_store
    if nodes == 1 or env.missing_meeting_place():
        return
    address, port = environment.main_address, environment.main_port
    if not held and _is_first(environment, processes) and interfaces.is_local(address):
        return
    try:
        store = reach_store(address, port, REACH_S, "rank 0")
        report(store, env.rank(), problems.problems)
    except (ConnectError, RuntimeError):
        return  # what is wrong is said here in any case


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
