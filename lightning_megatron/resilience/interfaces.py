"""On which network interface the processes of a run listen.

By default gloo listens on the address that the host's name resolves to, and a `TCPStore` on all
interfaces: whoever reaches the machine reaches them, and neither asks who is there. Processes that
all run on one machine need no more than its loopback interface.
"""

import fcntl
import socket
import struct
from contextlib import suppress

EVERY = "0.0.0.0"
"""In place of an interface: listen on all."""

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def loopback() -> str:
    """Name of the interface that only this machine reaches."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def interface_names() -> list[str]:
    """What this machine has."""
    return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str:
    """IPv4 address of an interface of this machine.

    Raises:
        OSError: it has none.
    """
    if interface == loopback():
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def address_towards(host: str) -> str:
    """Address of this machine from which packets to ``host`` leave.

    Returns:
        Empty where there is no way to it, or where the address means nothing to other machines.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        address = str(probe.getsockname()[0])
        return "" if address.startswith("127.") else address
    return ""


def is_local(host: str) -> bool:
    """Whether ``host`` is this machine, by a name or address of it."""
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM):
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
                probe.bind((address[0], 0))
                return True
    return False
