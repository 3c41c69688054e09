"""What goes wrong at the address where the ranks meet, and what the user is told."""

import socket
from collections.abc import Iterator

import pytest

from lightning_megatron.errors import ConnectError
from lightning_megatron.launch import interfaces
from lightning_megatron.launch import rendezvous_store as meeting_place
from lightning_megatron.launch.rendezvous_store import host_store, reach_store
from tests.fault_tolerance.hangs.sockets import listening_addresses


@pytest.fixture
def foreign() -> Iterator[int]:
    """Port of somebody who listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_a_store_listens_on_the_interface_that_it_is_given() -> None:
    port = free_port()
    store = host_store("127.0.0.1", port, "127.0.0.1", 20)
    reach_store("127.0.0.1", port, 20, "rank 0").set("key", "value")
    assert store.get("key") == b"value"
    assert [address for address, p in listening_addresses() if p == port] == ["127.0.0.1"]


def test_a_store_for_several_machines_listens_on_all_interfaces() -> None:
    port = free_port()
    store = host_store("127.0.0.1", port, None, 20)
    [address] = [address for address, p in listening_addresses() if p == port]
    assert address in ("0.0.0.0", "::")
    del store


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_a_busy_port_is_named(foreign: int, address: str | None) -> None:
    with pytest.raises(ConnectError, match=rf"port {foreign}: Address already in use.*MASTER_PORT"):
        host_store("127.0.0.1", foreign, address, 20)


def test_somebody_else_at_the_port_is_named(foreign: int) -> None:
    with pytest.raises(ConnectError, match=rf"MASTER_PORT={foreign} is not the store of rank 0"):
        reach_store("127.0.0.1", foreign, 1.0, "rank 0")  # it does not answer


def test_an_unknown_name_is_not_waited_for_as_long_as_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting_place, "_NAME_S", 0.3)
    with pytest.raises(ConnectError, match="no host of that name"):
        reach_store("nobody.invalid", 4321, 3600.0, "rank 0")


@pytest.mark.parametrize(
    ("address", "why"),
    [("nobody.invalid", "no host of that name"), ("127.0.0.1", "Connection refused")],
)
def test_a_wrong_address_is_named(address: str, why: str) -> None:
    with pytest.raises(ConnectError, match=rf"MASTER_ADDR={address}.*{why}"):
        reach_store(address, free_port(), 0.5, "rank 0")


def test_interfaces() -> None:
    assert interfaces.loopback() in interfaces.interface_names()
    assert interfaces.address_of(interfaces.loopback()) == "127.0.0.1"
    assert interfaces.is_local("127.0.0.1")
    assert interfaces.is_local(socket.gethostname())
    assert not interfaces.is_local("nobody.invalid")
    assert not interfaces.is_local("198.51.100.7")  # kept for documentation, nobody's
    assert interfaces.Place(interfaces.loopback(), "127.0.0.1") in interfaces.places()
    assert all(interfaces.is_local(address) for _, address in interfaces.places())
    with pytest.raises(OSError, match="eth99 has no address"):
        interfaces.address_of("eth99")


def test_the_interface_that_leads_to_an_address() -> None:
    """An address of this machine leads to the interface that has it."""
    for place in interfaces.places():
        if not interfaces.is_loopback(place.address):
            assert interfaces.leading_to(place.address) == place
    # Which others cannot reach: the only interface, if there is one that they can.
    by_name = interfaces.leading_to("127.0.1.1")
    outside = {p.interface for p in interfaces.places() if not interfaces.is_loopback(p.address)}
    if len(outside) < 2:
        assert by_name is not None
        assert by_name.interface in (outside or {interfaces.loopback()})


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_store_has_the_family_of_its_address(address: str) -> None:
    if address not in [place.address for place in interfaces.places()]:
        pytest.skip(f"no {address} here")
    store = host_store(address, 0, address, 20)
    reach_store(address, store.port, 20, "rank 0").set("key", "value")
    assert store.get("key") == b"value"
