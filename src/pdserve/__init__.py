"""vLLM with prefill and decode split: launch, route, prove, observe, measure, plan."""

__version__ = "0.1.0"
