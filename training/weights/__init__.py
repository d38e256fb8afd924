"""Initial weights, files they are loaded from, and the digest that compares them."""
