"""Diagnosis of anybody's training logs: rules as data, streaming reader, judgement of root, cascade and advice."""
