"""Checks of a server against `transport/PROTOCOL.md`, over its own front door: `pagewire wire-check URL`."""

from pagewire_client.wire_check.check import CheckError, Outcome
from pagewire_client.wire_check.run import check_server

__all__ = ["CheckError", "Outcome", "check_server"]
