"""Money, as pure functions over events, prices and traces: what a job should cost, what it did, and what if."""
