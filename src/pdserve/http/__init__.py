"""HTTP/1.1 on both sides of the relay, over asyncio protocols and httptools: bytes and framing, no meaning."""
