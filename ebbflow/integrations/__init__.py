"""Adapters to training libraries, each in a module of the library's name, which needs that library."""
