"""What the ranks of a job printed: the record of a line, reading and merging them, and the command that shows them."""
