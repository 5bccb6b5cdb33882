"""Starting engines: from a configuration, a machine and a model to vLLM processes that never outlive pdserve."""
