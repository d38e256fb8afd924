"""What runs on every rank: model, data order, parallelism, engine, checkpoints, launching and watching ranks.

Importing this package imports no torch: launchers, agents and uploaders start in milliseconds because of it.
"""
