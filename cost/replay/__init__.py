"""What a finished run would have cost in another pool or with another interval of saves, and how good that guess is."""
