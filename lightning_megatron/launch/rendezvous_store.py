"""The store at which the processes of a run find each other.

Rank 0 holds it, at an address and port that all have been told; under torchrun, torchrun does.
torch would be opaque when that goes wrong (a port that is taken, an address that is not ours): each
client tries for minutes and logs every try. So we look first, with plain sockets, and say what is
wrong.
"""

import errno
import socket
import threading
import time
from datetime import timedelta

from lightning_megatron._torch.groups import Store, TCPStore
from lightning_megatron.errors import ConnectError

_PAUSE_S = 0.1
_NAME_S = 30.0
"""Seconds in which the name of a host must become known: clusters make names as machines start."""


def host_store(address: str, port: int, listen_on: str | None, timeout_s: float) -> TCPStore:
    """Hold the store of a run.

    Args:
        address: at which this process reaches it itself.
        port: to listen at; 0 for any that is free.
        listen_on: address of the interface that others reach it by; all interfaces if None.
        timeout_s: of waiting for keys.

    Raises:
        ConnectError: the port is taken, or the address is none of this machine.
    """
    if listen_on is None:
        _listen("", port).close()  # for the message; torch listens on IPv6 addresses as well
        file = None
    else:
        listening = _listen(listen_on, port)
        port = listening.getsockname()[1]
        file = listening.detach()  # the store closes it when it ends
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=file,
        # Stores that serve through libuv, or listen on IPv6 as well, let one connection in twenty
        # wait for five seconds on some machines (torch 2.13): they ask for the name of a client.
        use_libuv=False,
    )


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise ConnectError(_why_not_listening(address, port, error)) from None
    return listening


def _why_not_listening(address: str, port: int, error: OSError) -> str:
    begin = f"rank 0 cannot listen at {address or 'any address'}, port {port}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{begin}. Another process uses the port, perhaps an earlier run that has not ended; "
            "set MASTER_PORT to a free one, or leave it unset on a single machine"
        )
    if error.errno == errno.EACCES:
        return f"{begin}. Ports below 1024 are the system's; set MASTER_PORT to a higher one"
    return begin


def reach_store(address: str, port: int, timeout_s: float, holder: str) -> Store:
    """Connect to the store that another process holds.

    Args:
        address: of the machine where it is.
        port: at which it listens.
        timeout_s: how long to try.
        holder: who that process is, for the message.

    Raises:
        ConnectError: nobody answers there in time.
    """
    deadline = time.monotonic() + timeout_s
    _await_listener(address, port, deadline, timeout_s, holder)
    left = max(deadline - time.monotonic(), 1.0)
    stores: list[Store] = []
    errors: list[str] = []

    def greet() -> None:
        limit = timedelta(seconds=left)
        try:
            store = TCPStore(address, port, timeout=limit, wait_for_workers=False, use_libuv=False)
            stores.append(store)
        except RuntimeError as error:
            errors.append(str(error).splitlines()[0])

    # Of one that listens but does not answer, torch would wait for ever.
    greeting = threading.Thread(target=greet, daemon=True)
    greeting.start()
    greeting.join(left)
    if not stores:
        raise ConnectError(
            f"what listens at MASTER_ADDR={address}, MASTER_PORT={port} is not the store of "
            f"{holder}: {(errors or ['it does not answer'])[0]}. Give each run a port of its own"
        )
    return stores[0]


def _await_listener(
    address: str, port: int, deadline: float, timeout_s: float, holder: str
) -> None:
    """Return as soon as somebody listens there."""
    named_by = min(deadline, time.monotonic() + _NAME_S)
    while True:
        try:
            left = max(deadline - time.monotonic(), _PAUSE_S)
            socket.create_connection((address, port), timeout=left).close()
            return
        except OSError as error:
            until = named_by if isinstance(error, socket.gaierror) else deadline
            if time.monotonic() + _PAUSE_S > until:
                text = _why_not_reached(address, port, error, timeout_s, holder)
                raise ConnectError(text) from None
            time.sleep(_PAUSE_S)


def _why_not_reached(address: str, port: int, error: OSError, timeout_s: float, holder: str) -> str:
    if isinstance(error, socket.gaierror):
        return (
            f"MASTER_ADDR={address}: no host of that name ({error.strerror}); set it to the name "
            f"or address of the machine where {holder} runs"
        )
    reason = error.strerror or "no answer"
    return (
        f"MASTER_ADDR={address}, MASTER_PORT={port}: {holder} did not answer there within "
        f"{timeout_s:g} s (ConnectionConfig.init_timeout_s): {reason}. Either {holder} has not "
        "started, and is the missing rank, or address or port are not those that it was given"
    )
