"""Cost of training jobs: plans, prices, the ledger of what was paid, reports and simulations."""
