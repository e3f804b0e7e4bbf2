"""Groups of workers in the process that uses them: launch, calls and handles."""
