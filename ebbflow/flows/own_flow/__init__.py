"""The decorator `@ebbflow`: trainings in a step of the user's own Metaflow flow."""
