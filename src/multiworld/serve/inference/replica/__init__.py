"""One replica of one stage: batch queue, executor, and forwarding to the next stage."""
