"""Building blocks of every connection: sockets, TLS, shared secret, framing."""
