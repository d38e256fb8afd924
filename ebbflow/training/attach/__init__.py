"""Scripts that keep their own loop: `ebbflow.attach` and what runs them under an agent."""
