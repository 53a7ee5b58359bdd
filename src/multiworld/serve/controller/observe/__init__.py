"""What a service's operators see: facts, rates and diagnoses, from one place."""
