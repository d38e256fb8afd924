"""What a job should cost, where, and whether it may start: every pool judged, ranked, or refused with its reason."""
