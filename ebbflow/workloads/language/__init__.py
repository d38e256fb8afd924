"""Language models, their data and their tasks."""
