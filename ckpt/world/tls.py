"""Encrypted connections between processes of a job, which share one key and its certificate."""

from __future__ import annotations

import ssl


def server_tls(certificate: str) -> ssl.SSLContext:
    """For who listens. Raises OSError where `certificate` has no key and certificate in PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def client_tls(certificate: str) -> ssl.SSLContext:
    """Trusts who has the key of exactly this certificate; its name may be any."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    return context
