"""Stories for people: engines on a device, evaluation, and the server with its page."""
