"""The stand-in engine: vLLM's wire protocol, its P/D block accounting and its failure modes, without a model."""
