"""Which engines take a request: pure functions over snapshots."""
