"""Which addresses are everybody's, and a network that connects to no other.

A name is resolved once for a connection, all that it resolves to is looked at, and what was looked
at is connected to: a name that resolves to something else a moment later changes nothing. TLS goes
on to verify the name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import httpcore

from hivlp.models.errors import InputError

Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], Awaitable[list[Address]]]

_UNICAST6 = ipaddress.ip_network("2000::/3")
_SIX_TO_FOUR = ipaddress.ip_network("2002::/16")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What `is_global` of some versions of Python takes for everybody's, and one that is a cloud's own.
_NOBODYS = tuple(
    ipaddress.ip_network(text)
    for text in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20", "2001::/23")
)


def is_public(address: Address) -> bool:
    """Whether an address is everybody's: routed, unicast, and no other network's in disguise."""
    inner = _disguised(address)
    if inner is not None:
        return is_public(inner)
    if isinstance(address, IPv6Address) and address not in _UNICAST6:
        return False
    known = any(address in network for network in _NOBODYS if network.version == address.version)
    return address.is_global and not address.is_multicast and not known


def _disguised(address: Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for: mapped, translated or tunnelled."""
    if not isinstance(address, IPv6Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.sixtofour if address in _SIX_TO_FOUR else None


async def resolve(host: str, port: int) -> list[Address]:
    """All addresses of a name. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    texts = dict.fromkeys(str(place[4][0]) for place in found)
    return [ipaddress.ip_address(text.partition("%")[0]) for text in texts]


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to names all of whose addresses are allowed."""

    def __init__(self, resolve: Resolve, allowed: Callable[[Address], bool]) -> None:
        self._resolve = resolve
        self._allowed = allowed
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """A connection to the first address that answers.

        Raises InputError where one of them isn't allowed.
        """
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError("the name can't be resolved") from error
        if not addresses or not all(self._allowed(address) for address in addresses):
            message = f"image: {host} is at an address that is not public"
            raise InputError("url_not_allowed", message, param="image")
        for address in addresses[:-1]:
            try:
                return await self._connect(address, port, timeout, local_address, socket_options)
            except httpcore.ConnectError:
                continue
        return await self._connect(addresses[-1], port, timeout, local_address, socket_options)

    async def _connect(
        self,
        address: Address,
        port: int,
        timeout: float | None,
        local_address: str | None,
        socket_options: Iterable[Any] | None,
    ) -> httpcore.AsyncNetworkStream:
        return await self._network.connect_tcp(
            str(address), port, timeout, local_address, socket_options
        )

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)
