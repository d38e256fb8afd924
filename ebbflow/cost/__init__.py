"""Cost of training jobs: plans, prices, the ledger of what was paid, reports and bills.

It imports `core`, `infra` and `diagnose`, and never torch or Metaflow.
"""
