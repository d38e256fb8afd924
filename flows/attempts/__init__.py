"""One attempt of a training step that is sent to another machine: where it goes, what it is told, what became of it."""
