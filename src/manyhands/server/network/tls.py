"""TLS contexts of a server, from its certificate files."""

from __future__ import annotations

import ssl

from manyhands.errors import StoreError


def tls_contexts(
    cert: str | None, key: str | None, ca: str | None
) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """(for connections that a server accepts, for those that it opens); None without `cert`."""
    if not cert:
        return None, None
    accepts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        accepts.load_cert_chain(cert, key)
        return accepts, ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as e:
        raise StoreError(
            f"TLS certificate {cert}, key {key}, authority {ca}: {e}; "
            "give files in PEM format that belong together"
        ) from e
