"""A gateway of several processes: a front that accepts and speaks for all, and workers that are a whole gateway each."""
