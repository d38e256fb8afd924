"""Starting, watching and ending a gang: all ranks of one job, on all its nodes. `agent.run_gang` is the entry."""
