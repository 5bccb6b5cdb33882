"""The gateway: one OpenAI endpoint in front of split engines."""
