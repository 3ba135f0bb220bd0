"""Which addresses are everybody's: none of a network of one's own, in whatever disguise."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest

from hivlp.service.addresses import is_public, resolve

PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001::1"]
DISGUISED_PUBLIC = ["::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"]
OTHERS = {
    "this machine": ["127.0.0.1", "127.255.255.254", "0.0.0.0", "::1", "::"],
    "private": ["10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fc00::1", "fdff::1"],
    "link-local, where clouds tell secrets": ["169.254.169.254", "169.254.0.1", "fe80::1"],
    "site-local": ["fec0::1"],
    "carriers' own": ["100.64.0.1", "100.100.100.200"],
    "a cloud's own": ["168.63.129.16", "fd00:ec2::254"],
    "protocols'": ["192.0.0.1", "192.0.0.8", "192.0.0.170", "192.88.99.1", "2001:4:112::1"],
    "documents'": ["192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1"],
    "measurements'": ["198.18.0.1", "198.19.255.255", "2001:2::1"],
    "many at once": ["224.0.0.1", "239.255.255.250", "ff02::1", "ff0e::1", "255.255.255.255"],
    "nobody's yet": ["240.0.0.1", "100::1", "5f00::1", "4000::1", "e000::1"],
    "mapped": ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254"],
    "compatible, of old": ["::127.0.0.1", "::8.8.8.8", "::10.0.0.1"],
    "translated": ["64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808"],
    "tunnelled": ["2002:7f00:1::", "2002:a00:1::1", "2002:a9fe:a9fe::", "2001:0:808:808::1"],
}


@pytest.mark.parametrize("text", PUBLIC + DISGUISED_PUBLIC)
def test_addresses_that_are_everybodys(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(("kind", "text"), [(k, t) for k, ts in OTHERS.items() for t in ts])
def test_addresses_that_are_not(kind: str, text: str) -> None:
    assert not is_public(ipaddress.ip_address(text)), kind


@pytest.mark.parametrize("host", ["127.0.0.1", "0x7f.1", "2130706433", "017700000001", "127.1"])
def test_whatever_way_a_number_is_written_it_is_this_machine(host: str) -> None:
    found = asyncio.run(resolve(host, 80))
    assert found
    assert not any(is_public(address) for address in found)
