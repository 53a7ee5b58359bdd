"""One replica of one stage: its queue, its executor and its process."""
