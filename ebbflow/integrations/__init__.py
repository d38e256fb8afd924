"""Adapters to training libraries. Each module has the name of its library, and needs it installed."""
