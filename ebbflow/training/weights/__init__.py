"""Initial weights: initialisation from a seed, loading from safetensors files, and a digest to
compare weights.
"""
