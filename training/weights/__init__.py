"""The weights themselves: where they start, files they are loaded from, and the one number that tells them apart."""
