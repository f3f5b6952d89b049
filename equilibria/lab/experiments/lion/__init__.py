"""LION, implicit vision prompts (Wang and others 2024)."""
