"""`python -m infra adopt`: the configuration of a job from what an account already has. Reads, and changes nothing."""
