"""People in the loop: devices and scripts that take over from the policy for some steps of an environment."""
