"""Worker: one replica of one stage, with its queue, executor and process."""
