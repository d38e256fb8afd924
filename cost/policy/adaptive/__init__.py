"""Our own policy: a Markov decision process over slack and capacity, weighted by what the job has seen of its pool."""
