"""Groups of workers, as the process that launches them sees them: launch, calls and handles."""
