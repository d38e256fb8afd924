"""Language models, with their data and their tasks."""
