"""Where a process listens for others of its job, and how what they say is encrypted."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import socket
import struct
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from ckpt.errors import CheckpointError
from ckpt.world.liveness import Card
from storage.http import client_tls, server_tls

PORTS_VARIABLE = "SHARDPOINT_PORTS"
CERTIFICATE_VARIABLE = "SHARDPOINT_CERTIFICATE"
TOKEN_VARIABLE = "SHARDPOINT_TOKEN"
SIOCGIFADDR = 0x8915  # of Linux


class Place(NamedTuple):
    """Where a process listens: on one address ("" for all), at the first free one of some ports
    (0: the system chooses), encrypted where there is a file with a key and its certificate.
    """

    address: str = ""
    ports: range = range(1)
    certificate: str = ""


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface, else an IPv6 one that others may use. Raises
    CheckpointError where there is none.
    """
    request = struct.pack("256s", name.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for digits, _, _, scope, _, own in map(str.split, file):
            if own == name and scope in ("00", "10"):  # global, or the host's own
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    known = ", ".join(other for _, other in socket.if_nameindex())
    raise CheckpointError(f"interface {name!r} has no address; this host has {known}")


def listening(place: Place) -> socket.socket:
    """Raises CheckpointError where no port of the place is free."""
    error: OSError | None = None
    is_both = not place.address and socket.has_dualstack_ipv6()
    families = [socket.AF_INET6] if is_both or ":" in place.address else []
    # A container may have no IPv6 all the same.
    families += [] if ":" in place.address else [socket.AF_INET]
    for port, family in product(place.ports, families):
        both = is_both and family is socket.AF_INET6
        try:
            return socket.create_server(
                (place.address, port), family=family, backlog=128, dualstack_ipv6=both
            )
        except OSError as failed:
            error = failed
    raise CheckpointError(
        f"cannot listen for other ranks on {place.address or 'any address'}, ports "
        f"{place.ports[0]} to {place.ports[-1]}: {error}. Each process of a host needs a port"
    ) from error


class Tls:
    """Both sides of encrypted connections. Raises CheckpointError for no certificate."""

    def __init__(self, path: str) -> None:
        try:
            self.client, self.server = client_tls(path), server_tls(path)
            (certificate, *_) = self.client.get_ca_certs(binary_form=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{CERTIFICATE_VARIABLE}={path!r}: {error}; expected a PEM file with a key and its "
                "self-signed certificate"
            ) from error
        self.digest = hashlib.sha256(certificate).hexdigest()


def secured(
    tls: Tls | None, way: Callable[[], socket.socket], theirs: Card, own: Card
) -> socket.socket:
    """What `way` gives, encrypted by `tls`. Raises OSError, also for another certificate there."""
    if theirs.certificate != own.certificate:
        raise OSError(
            f"rank {theirs.rank} has {_certificate_of(theirs)}, this process "
            f"{_certificate_of(own)}: {CERTIFICATE_VARIABLE} must name the same file on all ranks"
        )
    sock = way()
    if tls is None:
        return sock
    try:
        return tls.client.wrap_socket(sock)
    except BaseException:
        sock.close()
        raise


def _certificate_of(card: Card) -> str:
    return f"certificate {card.certificate[:8]}" if card.certificate else "no certificate"
