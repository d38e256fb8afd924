"""What watches numbers, weights and memory while a job trains, and what is done about them (docs/survival.md)."""
