"""HTTP on this machine: who may ask, and where it is served. FastAPI and uvicorn are extras.

This package imports top-level modules of latedrop, and none of its other packages.
"""

from __future__ import annotations

from ipaddress import ip_address

__all__ = ["is_loopback"]


def is_loopback(host: str) -> bool:
    """Return True if a name or an address is this machine, as itself sees it.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("192.168.0.7")
    (True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
