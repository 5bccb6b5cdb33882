"""Proof that the KV cache moved for one request, and that the answer is what one engine alone gives."""
