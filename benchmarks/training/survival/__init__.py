"""`ebbflow bench survival`: the time to a verdict, the named culprit, and the time to recover."""
