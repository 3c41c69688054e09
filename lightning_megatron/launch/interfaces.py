"""Choice of the network interface on which the processes of a run listen.

By default gloo listens on the address that the host's name resolves to, and a `TCPStore` on all
interfaces: whoever reaches the machine reaches them, and neither asks who is there. Processes that
all run on one machine need no more than its loopback interface.

Processes of several machines need the interface by which the machines reach each other. The name of
the host often does not tell it: Debian and Ubuntu let it resolve to 127.0.1.1, and some machines
have no name at all; gloo would then listen where only its own machine reaches it. So the kernel is
asked by which interface packets to MASTER_ADDR leave: it answers when a datagram socket is
connected, which sends nothing. On the machine of rank 0 MASTER_ADDR is an address of its own, and
the interface is the one that has it. Where it resolves to a loopback address there, too, it is the
only interface of the machine, or of several the one by which packets to other networks leave.
"""

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

EVERY = "0.0.0.0"
"""Value in the place of an interface: listen on all."""

# Linux: requests for the IPv4 addresses of all interfaces, and for the state of one.
_SIOCGIFCONF = 0x8912
_SIOCGIFFLAGS = 0x8913
_UP, _RUNNING = 0x1, 0x40
_ENTRY_BYTES = 40
_MOST_ENTRIES = 1024
_ELSEWHERE = ("198.51.100.1", "2001:db8::1")
"""Addresses kept for documentation: packets to them would take the default route."""


class Place(NamedTuple):
    """An address of this machine, and the interface that has it."""

    interface: str
    address: str


def loopback() -> str:
    """Name of the interface that only this machine reaches."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def interface_names() -> list[str]:
    """Names of this machine's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str:
    """Address of an interface of this machine, the IPv4 one if it has one.

    Raises:
        OSError: it has none.
    """
    if interface == loopback():
        return "127.0.0.1"
    found = [place.address for place in places() if place.interface == interface]
    if not found:
        raise OSError(f"the network interface {interface} has no address")
    return found[0]


def places() -> list[Place]:
    """Addresses of this machine, those of IPv4 first; none on other systems than Linux."""
    with suppress(OSError):
        return [*_ipv4_places(), *_ipv6_places()]
    return []


def _ipv4_places() -> Iterator[Place]:
    memory = array.array("B", bytes(_ENTRY_BYTES * _MOST_ENTRIES))
    request = struct.pack("iP", len(memory), memory.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        filled, _ = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    for at in range(0, filled, _ENTRY_BYTES):
        entry = memory[at : at + _ENTRY_BYTES].tobytes()
        name = entry[:16].split(b"\0")[0].decode().split(":")[0]  # eth0:1 is a label
        yield Place(name, socket.inet_ntoa(entry[20:24]))


def _ipv6_places() -> Iterator[Place]:
    with suppress(FileNotFoundError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if not address.is_link_local:  # which means nothing without its interface
                yield Place(name, str(address))


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address, which is a number."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def addresses_of_host(host: str) -> list[str]:
    """Addresses, as numbers, that a name resolves to; none if it does not."""
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(where[0]) for *_, where in found))
    return []


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


def listen(address: str) -> socket.socket:
    """Listen at a free port of one of this machine's addresses.

    Raises:
        OSError: it has no such address.
    """
    listening = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        listening.bind((address, 0))
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening


def is_local(host: str) -> bool:
    """Whether ``host`` is this machine, by a name or address of it."""
    return bool(_own(host))


def _own(host: str) -> list[str]:
    """Addresses of ``host`` that are this machine's."""
    return [address for address in addresses_of_host(host) if _can_listen(address)]


def _can_listen(address: str) -> bool:
    with suppress(OSError), socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_reached_by_name() -> bool:
    """Whether what listens at this host's name, as gloo does, is reached by other machines."""
    own = _own(socket.gethostname())
    return bool(own) and not is_loopback(own[0])


def leading_to(host: str, otherwise: str | None = None) -> Place | None:
    """Interface and address at which others that meet at ``host`` reach this machine.

    Args:
        host: MASTER_ADDR, which may be this machine.
        otherwise: interface to take where ``host`` tells none.

    Returns:
        None if this machine has several interfaces, and neither ``host`` nor the default route
        tells which of them. The loopback interface if it has no other.
    """
    own = [address for address in _own(host) if not is_loopback(address)]
    found = own[:1] or [a for a in map(_leaving_for, addresses_of_host(host)) if a is not None]
    for place in places():
        if place.address in found and not is_loopback(place.address):
            return place
    if otherwise is not None and otherwise in interface_names():
        return Place(otherwise, address_of(otherwise))
    outside = [p for p in places() if not is_loopback(p.address) and _is_running(p.interface)]
    if not outside:
        return Place(loopback(), "127.0.0.1")
    names = {place.interface for place in outside}
    if len(names) > 1:
        default = [_leaving_for(address) for address in _ELSEWHERE]
        outside = [place for place in outside if place.address in default]
    return next(iter(outside), None)


def _leaving_for(address: str) -> str | None:
    """Address of this machine from which packets to another one leave; None without a route."""
    with suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        return str(probe.getsockname()[0])
    return None


def _is_running(interface: str) -> bool:
    """Whether it is up and has a carrier: a bridge of containers that do not run has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
    flags: int = struct.unpack_from("H", answer, 16)[0]
    return bool(flags & _UP) and bool(flags & _RUNNING)
