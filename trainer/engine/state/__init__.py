"""The optimizer's state in files that do not depend on how it was spread over ranks."""
