"""Money, as pure functions over events, prices and traces: catalogue, fit, plan, ledger and report."""
