"""Bills: reconciliation, matching, allocation, FOCUS exports, teams and replays.

Loaded only by the commands that need them.
"""
