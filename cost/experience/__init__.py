"""What past jobs of a store have shown: how often pools took their machines back, and how fast a model trained.

`records` makes it from a job's events, `book` keeps it in the store, `belief` answers a plan's questions with it.
"""
