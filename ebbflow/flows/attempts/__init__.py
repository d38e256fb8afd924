"""Attempts of training steps on other machines: placement, submission and outcome of each."""
