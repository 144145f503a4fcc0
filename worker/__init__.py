"""The queue: workers that take jobs, attempts under a lease, and the reconciler."""
