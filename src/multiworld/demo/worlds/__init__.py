"""The demo: a leader, two workers, a real model, and a worker that is killed."""
